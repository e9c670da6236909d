"""A run as HTML: the same words as its text form, folded where a live view has told them already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ddpkit.diagnosis.run import Diagnosis
from ddpkit.runfolder.stable import stable

from . import text
from .rows import Row
from .shown import ShownRun

_COLOURS = {"passed": "#1a7f37", "running": "#0969da", "stopped": "#6e7781", "apart": "#9a6700"}


def as_html(run: ShownRun, below_view: bool = False) -> str:
    """`run` as HTML; below a live view, which has told all of it already, folded under the headline."""
    apart = run.state == "passed" and run.diagnosis is not None and run.revealed
    headline = _headline(text.headline(run), "apart" if apart else run.state)
    notes = "".join(f"<div>note: {escape(note)}</div>" for note in run.notes)
    if run.revealed and run.answers:
        answers = (("✓" if one.right else "✗", escape(str(one))) for one in run.answers)
        notes = f"<table>{''.join(map(table_row, answers))}</table>{notes}"
    if run.state in ("running", "passed") and not apart:
        return f'<div class="ddpkit-run"><div>{headline}</div>{notes}</div>'
    parts = []
    if run.revealed and text.what_happened(run):
        parts.append(f"<div>{escape(text.what_happened(run))}</div>")
    if run.revealed and run.diagnosis:
        parts.append(_diagnosis(run.diagnosis))
    if not apart:
        parts.append(rows_as_html(run.rows))
    closed = "" if below_view else " open"
    body = f"<details{closed}><summary>{headline}</summary>{''.join(parts)}</details>"
    return f'<div class="ddpkit-run">{body}{notes}</div>'


def _headline(headline: str, state: str) -> str:
    name, _, rest = headline.partition(" → ")
    colour = _COLOURS.get(state, "#cf222e")
    return f'<b>{escape(name)}</b> → <b style="color:{colour}">{escape(rest)}</b>'


def _diagnosis(diagnosis: Diagnosis) -> str:
    more = f"<div>{escape(text.first_paragraph(diagnosis))}</div>"
    return f"<details><summary>diagnosis: {escape(text.diagnosis_line(diagnosis))}</summary>{more}</details>"


def rows_as_html(table: Sequence[Row]) -> str:
    """What each rank did, with its stack, as HTML."""
    return f"<table>{''.join(map(_row, table))}</table>{_stacks(table)}"


def _row(row: Row) -> str:
    said = f"<code>{escape(row.said_in_full)}</code>" if row.said_in_full else ""
    return table_row((escape(row.name), escape(row.words), said))


def table_row(cells: Iterable[str], tag: str = "td") -> str:
    """A row of a table; its `cells` are HTML."""
    return "<tr>" + "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in cells) + "</tr>"


def _stacks(table: Sequence[Row]) -> str:
    """The user's own frames of each stack; the libraries' line numbers change with their versions, and stay out."""
    found = "".join(
        f"<div>{escape(row.name)}, most recent call first:</div><pre>{escape(stable(chr(10).join(own)))}</pre>"
        for row in table
        if (own := [f"{frame.text}   ({frame.function}, {text.short_file(frame)})" for frame in row.stack if frame.own])
    )
    return f"<details><summary>stacks, your own lines</summary>{found}</details>" if found else ""
