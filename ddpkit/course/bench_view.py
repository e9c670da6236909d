"""The controls of a `FixBench` in a notebook: remedies to choose, the script as a diff, live lanes, results.

They are ipywidgets, so that keys reach all of them. Each calls a method of the bench. A run has a thread of its own, so
that the kernel stays free.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

from ddpkit.display.html import as_html
from ddpkit.display.view import RunView
from ddpkit.errors import LaunchError

from .lab import Remedy
from .trial import Result

# Lines shown around a change; what lies farther off is folded.
AROUND = 3
STYLE = f"<style>{Path(__file__).with_name('bench.css').read_text(encoding='utf-8')}</style>"


class BenchView:
    """The widgets of one bench, a `FixBench`; `box` holds them all."""

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self._chosen = {r.name: self._checkbox(r) for r in bench.remedies}
        self._own = widgets.Checkbox(description="Your own edit", indent=False)
        self._text = widgets.Textarea(rows=24, layout=_wide(display="none"), description_allow_html=False)
        self._prediction = widgets.ToggleButtons(
            options=[("it cures", "cures"), ("it does not", "does not")], value=None, style={"button_width": "auto"}
        )
        self._run = widgets.Button(description="Run", button_style="primary", disabled=True, tooltip="Predict first")
        self._stop = widgets.Button(description="Stop", disabled=True, tooltip="End every rank")
        self._diff, self._say, self._table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._stage = widgets.VBox(layout=_wide())
        self.box = self._laid_out()
        for control in (*self._chosen.values(), self._own, self._text):
            control.observe(self._changed, "value")
        self._prediction.observe(lambda _: self._enable(), "value")
        self._run.on_click(lambda _: self._clicked_run())
        self._stop.on_click(lambda _: threading.Thread(target=self._bench.stop, daemon=True).start())
        self._changed({"owner": None})
        self.show_results()

    def _checkbox(self, remedy: Remedy) -> Any:
        fits = self._bench.fits(remedy.name)
        words = remedy.title if fits else f"{remedy.title} (finds no place in your script: use your own edit)"
        return widgets.Checkbox(description=words, indent=False, disabled=not fits, tooltip=remedy.title)

    def _laid_out(self) -> Any:
        lab = self._bench.lab
        head = widgets.HTML(f'{STYLE}<div class="bench-head"><b>Bench</b> · {escape(lab.title)}</div>')
        ask = widgets.HTML("<b>Your prediction</b>, before it runs:")
        buttons = widgets.HBox([self._run, self._stop], layout=widgets.Layout(padding="6px 0"))
        title = widgets.HTML("<b>Remedies</b>; several may go together")
        controls = [title, *self._chosen.values(), self._own, ask, self._prediction, buttons, self._say]
        side = widgets.VBox(controls, layout=widgets.Layout(flex="1 1 300px", padding="8px 12px", min_width="260px"))
        code = widgets.VBox(
            [self._diff, self._text], layout=widgets.Layout(flex="1.4 1 380px", min_width="0", overflow="hidden")
        )
        work = widgets.HBox([code, side], layout=widgets.Layout(flex_flow="row wrap", width="100%"))
        box = widgets.VBox([head, work, self._stage, self._table], layout=_wide())
        box.add_class("ddpkit-bench")
        return box

    @property
    def _names(self) -> list[str]:
        return [name for name, box in self._chosen.items() if box.value]

    def _changed(self, change: Any) -> None:
        """Something was chosen or written: the diff is drawn anew, and a new prediction is asked for."""
        own = bool(self._own.value)
        if change["owner"] is self._own and own:
            self._text.value = self._combined() or self._bench.script
        self._text.layout.display = "" if own else "none"
        for name, box in self._chosen.items():
            box.disabled = own or not self._bench.fits(name)
        script = self._text.value if own else self._combined()
        if script is not None:
            self._diff.value = f'<div class="bench-code" tabindex="0">{diff(self._bench.script, script)}</div>'
        if change["owner"] is not None and change["owner"] is not self._text:
            self._prediction.value = None
        self._enable()

    def _combined(self) -> str | None:
        """The script with what is chosen; None, and a sentence, where two of them clash."""
        try:
            script = self._bench.script_with(*self._names)
        except LaunchError as error:
            self._tell(str(error))
            return None
        self._tell(self._bench.why_not_here)
        return script

    def _enable(self) -> None:
        running = not self._stop.disabled
        clash = not self._own.value and self._combined() is None
        here = not self._bench.why_not_here
        self._run.disabled = running or clash or self._prediction.value is None or not here
        self._run.tooltip = "Start the job" if self._prediction.value else "Predict first: does it cure?"

    def _clicked_run(self) -> None:
        self._run.disabled, self._stop.disabled = True, False
        names, own, predicted = self._names, self._text.value if self._own.value else None, self._prediction.value
        # Now rather than at its end, when the reader may have predicted the next one already.
        self._prediction.value = None
        threading.Thread(target=self._run_it, args=(names, own, predicted), daemon=True).start()

    def _run_it(self, names: Sequence[str], own: str | None, predicted: str) -> None:
        view = RunView()
        self._stage.children = (view,)
        try:
            self._bench.run(*(names if own is None else ()), edit=own, predict=predicted, show=view)
        except LaunchError as error:
            self._tell(str(error))
        finally:
            self._stop.disabled = True
            self._enable()

    def _tell(self, words: str) -> None:
        self._say.value = f'<div role="status">{escape(words)}</div>' if words else ""

    def show_results(self) -> None:
        results = self._bench.results
        self._table.value = f'<div class="bench-results">{table(results)}</div>' if results else ""


def table(results: Sequence[Result]) -> str:
    """The results as HTML, with each run folded below its remedy."""
    titles = ("remedy", "you said", "verdict", "replicas", "as one process", "exit codes")
    head = "".join(f'<th scope="col">{escape(t)}</th>' for t in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, results))}</tbody></table>"


def _row(result: Result) -> str:
    tried, said, verdict, replicas, off, codes = map(escape, result.cells)
    mark = '<span class="yes">✓</span>' if result.cures else '<span class="no">✗</span>'
    cells = (tried, said, f"{mark} {verdict}", replicas, off, codes)
    peaks = [f"rank {r.rank} {r.peak_rss_mib:.0f} MiB" for r in result.run.ranks if r.peak_rss_mib]
    more = f"<div>peak memory: {', '.join(peaks)}</div>" if peaks else ""
    why = f"<div>{escape(result.why)}</div>" if result.why else ""
    evidence = f"{why}<details><summary>evidence</summary>{as_html(result.run)}{more}</details>"
    return (
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr><tr><td colspan='{len(cells)}'>{evidence}</td></tr>"
    )


def diff(before: str, after: str) -> str:
    """`after` as HTML, numbered, with what was taken from `before` and what was put in; far from a change, folded."""
    old, new = before.splitlines(), after.splitlines()
    parts = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            lines = [_line("", " ", i + 1 + c - a, old[i]) for i in range(a, b)]
            around = (0 if a == 0 else AROUND, 0 if b == len(old) else AROUND)
            parts.append(_folded(lines, *around) if before != after else _table(lines))
        else:
            parts.append(_table(_line("old", "−", i + 1, old[i]) for i in range(a, b)))
            parts.append(_table(_line("new", "+", i + 1, new[i]) for i in range(c, d)))
    return "".join(parts)


def _folded(lines: Sequence[str], first: int, last: int) -> str:
    """The `first` and `last` of these lines, those between them folded where they are 3 or more."""
    end = len(lines) - last
    if end - first < 3:
        return _table(lines)
    inside = f"<details><summary>{end - first} lines</summary>{_table(lines[first:end])}</details>"
    return _table(lines[:first]) + inside + _table(lines[end:])


def _line(kind: str, sign: str, number: int, text: str) -> str:
    return f'<tr class="{kind}"><td class="n">{number}</td><td class="n">{sign}</td><td>{escape(text) or " "}</td></tr>'


def _table(rows: Iterable[str]) -> str:
    inside = "".join(rows)
    return f'<table role="presentation">{inside}</table>' if inside else ""


def _wide(**more: Any) -> Any:
    return widgets.Layout(width="100%", **more)
