"""Start, stop, keep and fork processes, so that none is left behind."""
