"""The errors a caller of ddpkit may meet; kept apart so that every room can raise them without import loops."""

from __future__ import annotations


class LaunchError(ValueError):
    """The job was not started: what was asked, what was found, what to do."""

    def _render_traceback_(self) -> list[str]:
        """In a notebook the sentence is all: a traceback through ddpkit would say nothing about the mistake."""
        return [f"{type(self).__name__}: {self}"]


class LogError(ValueError):
    """There is no log to diagnose: what was asked, what was found, what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]
