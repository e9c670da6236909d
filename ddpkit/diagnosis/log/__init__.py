"""`ddpkit.diagnose` of a log that somebody brings."""
