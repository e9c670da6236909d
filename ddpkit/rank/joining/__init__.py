"""`setup()`: the process group up, with each step said, and down on every path."""
