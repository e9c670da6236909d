"""Names the rank at fault in a job that failed or hangs, from its records alone; docs/verdict.md states the rules."""
