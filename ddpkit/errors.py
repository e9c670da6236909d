"""The errors that ddpkit raises for its callers; in a file of their own to avoid import cycles."""

from __future__ import annotations


class LaunchError(ValueError):
    """The job was not started; the message says what was asked, what was found, and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Show only the message in a notebook: a traceback through ddpkit would not explain the mistake."""
        return [f"{type(self).__name__}: {self}"]


class LogError(ValueError):
    """There is no log to diagnose; the message says what was asked, what was found, and what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
