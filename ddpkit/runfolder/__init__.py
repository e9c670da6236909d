"""The run folder: every path and name, and the records read back as plain data."""
