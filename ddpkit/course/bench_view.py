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

from ddpkit.display.html import rows_as_html
from ddpkit.display.view import RunView
from ddpkit.errors import LaunchError

from .trial import Result, Results, predictions

# Lines shown around a change; what is farther off is folded.
AROUND, ABOVE_THE_FAULT = 3, 6
STYLE = f"<style>{Path(__file__).with_name('bench.css').read_text(encoding='utf-8')}</style>"


class BenchView:
    """The widgets of one bench, a `FixBench`; `box` holds them all."""

    def __init__(self, bench: Any) -> None:
        self._bench = bench
        self._running = False
        fitting = [r for r in bench.remedies if bench.fits(r.name)]
        self._chosen = {r.name: widgets.Checkbox(description=r.title, indent=False) for r in fitting}
        self._own = widgets.Checkbox(description="Your own edit", indent=False)
        self._text = widgets.Textarea(rows=24, layout=_wide(display="none"))
        self._prediction = widgets.ToggleButtons(
            options=predictions(bench.lab), value=None, style={"button_width": "auto"}
        )
        self._run = widgets.Button(description="Run", button_style="primary", disabled=True)
        self._head, self._diff, self._why_not = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._say, self._table = widgets.HTML(), widgets.HTML()
        self._stage = widgets.VBox(layout=_wide())
        self.box = self._laid_out()
        for control in (*self._chosen.values(), self._own, self._text):
            control.observe(self._changed, "value")
        self._prediction.observe(lambda _: self._enable(), "value")
        self._run.on_click(lambda _: self._clicked_run())
        self._changed({"owner": None})
        self.show_results()

    def _others(self) -> Any:
        """The remedies that do not fit this script: a line each, with what to do by hand."""
        others = [r for r in self._bench.remedies if r.name not in self._chosen]
        lines = "".join(f"<div>{escape(r.title)}: <code>{escape(r.by_hand)}</code></div>" for r in others)
        head = f"{len(others)} more do not fit this script; by hand, with your own edit"
        return widgets.HTML(
            f'<details class="bench-muted"{"" if self._chosen else " open"}><summary>{head}</summary>{lines}</details>'
            if others
            else ""
        )

    def _laid_out(self) -> Any:
        ask = widgets.HTML("<b>Your prediction</b>, before it runs: the job …")
        button = widgets.HBox([self._run, self._why_not], layout=widgets.Layout(padding="6px 0", align_items="center"))
        several = "; several may go together" if self._chosen else ": none fits this script."
        several = several if self._bench.remedies else f": {escape(self._bench.offers)}."
        title = widgets.HTML(f"<b>Remedies</b>{several}")
        controls = [title, *self._chosen.values(), self._own, self._others(), ask, self._prediction, button, self._say]
        side = widgets.VBox(controls, layout=widgets.Layout(flex="1 1 300px", padding="8px 12px", min_width="260px"))
        code = widgets.VBox(
            [self._diff, self._text], layout=widgets.Layout(flex="1.4 1 380px", min_width="0", overflow="hidden")
        )
        work = widgets.HBox([code, side], layout=widgets.Layout(flex_flow="row wrap", width="100%"))
        box = widgets.VBox([self._head, work, self._table, self._stage], layout=_wide())
        box.add_class("ddpkit-bench")
        return box

    @property
    def names(self) -> list[str]:
        """The remedies that are chosen."""
        return [name for name, box in self._chosen.items() if box.value]

    @property
    def own(self) -> str | None:
        """The reader's own edit; None where remedies are chosen instead."""
        return self._text.value if self._own.value else None

    def _changed(self, change: Any) -> None:
        """Something was chosen or written: the diff is drawn anew, and a new prediction is asked for."""
        if change["owner"] is self._own and self._own.value:
            self._text.value = self._combined()[0] or self._bench.script
        self._text.layout.display = "" if self._own.value else "none"
        for box in self._chosen.values():
            box.disabled = self._own.value
        script = self._combined()[0] if self.own is None else self.own
        if script is not None:
            self._diff.value = (
                f'<div class="bench-code" tabindex="0">{diff(self._bench.script, script, self._bench.fault)}</div>'
            )
        if change["owner"] is not None and change["owner"] is not self._text:
            self._prediction.value = None
        self._enable()

    def _combined(self) -> tuple[str | None, str]:
        """The script with what is chosen, or None and a sentence, where two of them clash."""
        try:
            return self._bench.script_with(*self.names), ""
        except LaunchError as error:
            return None, str(error)

    def _enable(self) -> None:
        """The button works where a run may start; the text beside it says why not."""
        clash = self._combined()[1] if self.own is None else ""
        why_not = self._bench.why_not_here or ("a run goes on" if self._running else clash)
        if not why_not and self._prediction.value is None:
            why_not = "choose a prediction first"
        self._run.disabled = bool(why_not)
        self._why_not.value = f'<span class="bench-muted">{escape(why_not)}</span>'

    def _clicked_run(self) -> None:
        self._running = True
        names, own, predicted = self.names, self.own, self._prediction.value
        # Now rather than at its end, when the reader may have predicted the next one already.
        self._prediction.value = None
        self._enable()
        threading.Thread(target=self._run_it, args=(names, own, predicted), daemon=True).start()

    def _run_it(self, names: Sequence[str], own: str | None, predicted: str) -> None:
        view = RunView()
        self._stage.children = (view,)
        self._tell("")
        try:
            self._bench.run(*(names if own is None else ()), edit=own, predict=predicted, show=view)
        except LaunchError as error:
            self._tell(str(error))
        finally:
            self._running = False
            self._enable()

    def _tell(self, words: str) -> None:
        self._say.value = f'<div class="bench-say" role="status">{escape(words)}</div>' if words else ""

    def show_results(self) -> None:
        """Draw title and table anew, with the response to the newest result's prediction."""
        results = self._bench.results
        given = f'<div class="bench-muted">as launched: {escape(self._bench.given)}</div>' if self._bench.given else ""
        self._head.value = f'{STYLE}<div class="bench-head"><b>{escape(self._bench.title)}</b>{given}</div>'
        self._table.value = f'<div class="bench-results">{table(results)}</div>' if results else ""
        self._tell(results[-1].response if results else "")


def table(results: Sequence[Result]) -> str:
    """The results as HTML, newest first; below each, folded, why, and what its ranks did."""
    cells = "".join(f'<th scope="col">{escape(t)}</th>' for t in Results.TITLES)
    rows = "".join(_row(result, result is results[-1]) for result in reversed(results))
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table>"


def _row(result: Result, newest: bool) -> str:
    tried, said, came, *compared, ranks = map(escape, result.cells)
    mark = '<span class="yes">✓</span>' if result.cures else '<span class="no">✗</span>'
    cells = (tried, said, f"{mark} {came}", *compared, ranks)
    inside = (f'<td data-title="{title}">{cell}</td>' for title, cell in zip(Results.TITLES, cells, strict=True))
    row = f"<tr>{''.join(inside)}</tr>"
    peaks = [f"rank {r.rank} {r.peak_rss_mib:.0f} MiB" for r in result.run.ranks if r.peak_rss_mib]
    more = f"<div>peak memory: {', '.join(peaks)}</div>" if peaks else ""
    evidence = f"<details><summary>evidence</summary>{rows_as_html(result.run.rows)}{more}</details>"
    if not result.why:
        return f"{row}<tr><td colspan='{len(cells)}'>{evidence}</td></tr>"
    why = f"<details{' open' if newest else ''}><summary>why</summary>{escape(result.why)}</details>"
    return f"{row}<tr><td colspan='{len(cells)}'>{why}{evidence}</td></tr>"


def diff(before: str, after: str, fault: tuple[int, str] | None = None) -> str:
    """`after` as HTML, numbered, with what was taken from `before` and what was put in; far from a change, folded.

    `fault`: the number of a line of `before` to mark, and why. Without a change, what is far above it is folded.
    """
    old, new = before.splitlines(), after.splitlines()
    if fault and before == after:
        lines = [_line("", " ", i, text) for i, text in enumerate(old, 1)]
        lines[fault[0] - 1] = _fault(*fault, old[fault[0] - 1])
        above = max(fault[0] - 1 - ABOVE_THE_FAULT, 0)
        return _folded(lines[:above], 0, 0) + _table(lines[above:])
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


def _fault(number: int, why: str, text: str) -> str:
    marked = _line("fault", "▸", number, text)
    return f'{marked}<tr class="fault"><td></td><td></td><td class="bench-muted">{escape(why)}</td></tr>'


def _table(rows: Iterable[str]) -> str:
    inside = "".join(rows)
    return f'<table role="presentation">{inside}</table>' if inside else ""


def _wide(**more: Any) -> Any:
    return widgets.Layout(width="100%", **more)
