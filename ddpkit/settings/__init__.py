"""The settings of a training run, without torch: keys, defaults and checks."""
