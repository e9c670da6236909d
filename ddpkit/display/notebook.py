"""Chooses how a job is shown - live view in a kernel, text in a terminal - and shows a run that has ended."""

from __future__ import annotations

import os
import sys
from typing import Any

from ddpkit.errors import LaunchError
from ddpkit.runfolder import wire

from .shown import ShownRun
from .sink import Silence, Sink

_DEFAULTS: dict[str, bool | str] = {"": True, "1": True, "text": "text", "0": False}
_shown: dict[int, object] = {}


def shell() -> Any:
    """The IPython shell of this kernel; None outside a Jupyter kernel. IPython is not imported to find out."""
    ipython = sys.modules.get("IPython")
    found = ipython.get_ipython() if ipython is not None else None
    return found if found is not None and hasattr(found, "kernel") else None


def sink_for(show: bool | str | Sink | None) -> Sink:
    """The sink for `show`: True, "text", False, None for what DDPKIT_SHOW says, or one that the caller has made.

    Raises:
        LaunchError: `show`, or DDPKIT_SHOW, is none of them.
    """
    if show is None:
        said = os.environ.get(wire.ENV_SHOW, "")
        if said not in _DEFAULTS:
            raise LaunchError(
                f"launch: {wire.ENV_SHOW}={said} is not known; use text, 1 (the live view) or 0 (nothing)."
            )
        show = _DEFAULTS[said]
    if show is False:
        return Silence()
    if not isinstance(show, bool | str):
        return show
    if show is True and shell() is not None:
        from .view import RunView

        return RunView()
    if show is True or show == "text":
        from .terminal import KernelText, TextSink

        return TextSink() if shell() is None else KernelText()
    raise LaunchError(f'launch: show={show!r} is not known; use True, "text" or False.')


def show_live(sink: Sink) -> None:
    """Put the live view, if `sink` is one, into the output of the cell that launches."""
    if hasattr(sink, "_repr_mimebundle_"):
        from IPython.display import display

        display(sink)


def show_ended(run: ShownRun, sink: Sink) -> None:
    """Under the live view of a job just waited for, its text and HTML; remembered, so that the cell does not repeat it."""
    kernel = shell()
    if kernel is not None and not isinstance(sink, Silence):
        if hasattr(sink, "_repr_mimebundle_"):
            _publish(run, below_view=True)
        _shown[id(run)] = kernel.execution_count


def display_run(run: ShownRun) -> None:
    """Called by IPython when a run is a cell's last expression."""
    kernel = shell()
    if kernel is None or _shown.pop(id(run), None) != kernel.execution_count:
        _publish(run)


def widget_bundle(widget: Any, text: str) -> dict[str, Any]:
    """What a cell shows for a widget: `text`, and the widget where it can be drawn; the same with ipywidgets 7 and 8."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"text/plain": text, "application/vnd.jupyter.widget-view+json": view}


def _publish(run: ShownRun, below_view: bool = False) -> None:
    from IPython.display import display

    from .html import as_html

    display({"text/plain": str(run), "text/html": as_html(run, below_view)}, raw=True)
