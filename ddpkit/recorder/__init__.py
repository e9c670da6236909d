"""Records inside every rank: failures, collectives, messages, steps, replicas."""
