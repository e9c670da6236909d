"""Checkpoints that are whole or not there; weights of whichever layout; random states."""
