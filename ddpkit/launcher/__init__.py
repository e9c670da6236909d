"""Turns a target and its options into a watched job: `launch`, `%%torchrun` and the commands."""
