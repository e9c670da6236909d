"""What ranks must have in common, and a limit for a step."""
