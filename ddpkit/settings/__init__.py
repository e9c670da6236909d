"""The settings of a training, without torch: keys, defaults and checks."""
