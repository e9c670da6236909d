"""From a target and its options to a watched job: `launch`, `%%torchrun` and the commands."""
