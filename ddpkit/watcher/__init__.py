"""Watches a running job: its logs, its progress, and its ranks when nothing moves."""
