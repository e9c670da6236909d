"""What this rank's memory holds, a budget for it, and what was there when it ran out."""
