"""Runs inside every rank, unasked: failures, collectives, messages, steps."""
