"""`Trainer` and its parts, and a whole training as a program."""
