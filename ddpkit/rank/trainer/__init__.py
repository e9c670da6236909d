"""`Trainer` and its parts, and a whole training run as a program."""
