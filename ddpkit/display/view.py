"""`RunView`: a running job as live lanes in a notebook; speaks by short messages to `view.js`, which draws them, and
`evidence.js`, which draws what was found when nothing moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from ddpkit.diagnosis.run import Diagnosis
from ddpkit.runfolder.frames import Frame
from ddpkit.runfolder.ranks import Rank

from .lane_feed import whole
from .lanes import LaneSink
from .rows import Row, Standstill, rows
from .shown import ShownRun
from .sink import Now
from .text import first_paragraph, short_file, what_happened

_WEB = Path(__file__).with_name("web")
PICTURE_CHARS = 240_000
MOST_EVIDENCE = 4
# A front end may load view.js late, and its question may wait behind the busy cell: then it is told unasked.
UNASKED_AT_S = (1.0, 3.0, 8.0)


class RunView(anywidget.AnyWidget, LaneSink):
    """The live view of one job: a lane per rank, memory, states, a Stop button. A `Sink`."""

    # A widget has one module; kept in two files.
    _esm = "".join((_WEB / name).read_text(encoding="utf-8") for name in ("view.js", "evidence.js"))
    _css = _WEB / "view.css"
    # What the job is: set once, at its beginning.
    job = traitlets.Dict().tag(sync=True)
    # The final picture, bounded: all that a view without a kernel has.
    final = traitlets.Dict().tag(sync=True)

    def __init__(self, **kwargs: Any) -> None:
        LaneSink.__init__(self)
        self._now: Now | None = None
        self._fresh = False
        self._told_still: Standstill | None = None
        self._sent = 0
        self._asked: list[str] = []
        self._unasked = list(UNASKED_AT_S)
        self._shown_at = 0.0
        self._stop: Callable[[], None] | None = None
        self._stopping = False
        super().__init__(**kwargs)
        self._hears_clicks = hear_clicks_while_busy(self)
        self.on_msg(self._hear)

    def __repr__(self) -> str:
        """The text form, which never varies, so that stored and fresh outputs compare equal."""
        ranks, name = self.job.get("nproc", 0), self.job.get("name", "no job yet")
        return f"live view of {name}: {ranks} rank{'' if ranks == 1 else 's'}"

    # The sink: called by the watching thread.

    def begin(self, run: ShownRun, stop: Callable[[], None]) -> None:
        """The job starts: its name goes out, the clock runs."""
        self._stop = stop
        about = {"name": run.name, "nproc": run.world_size, "command": run.command}
        facts = f"{run.facts} · {run.started}"
        self._shown_at = time.monotonic()
        self._keep("job", {**about, "facts": facts, "hears": self._hears_clicks})
        super().begin(run, stop)

    def now(self, now: Now) -> None:
        with self._lock:
            self._now, self._fresh = now, True
            for rank in now.ranks:
                self._lane(rank.rank).sample(now.elapsed_s, rank.rss_mib, rank.device_mib)
        super().now(now)

    def end(self, run: ShownRun) -> None:
        """The job has ended: the last lines go out, and the final picture is set."""
        super().end(run)
        picture = self._picture()
        # The last look at the ranks may be older than their last line.
        at = max(picture.get("at", 0), round((time.time_ns() - self._start_ns) / 1e9, 2))
        self._keep("final", {**picture, "at": at, "state": run.state, **_ending(run)})

    def _send_batch(self, chars: float) -> None:
        with self._lock:
            lanes = self._take(chars)
            states = self._states() if self._fresh else {}
            if self._now is not None and self._now.still != self._told_still:
                self._told_still = self._now.still
                states["still"] = _still(self._now)
            self._fresh = False
        if lanes or states:
            self._sent += 1
            self._tell({"kind": "batch", "n": self._sent, "lanes": lanes, **states})
        self._send_pictures()

    def _send_pictures(self) -> None:
        """Give late views what they missed; each view takes the first picture that is for it or for all."""
        with self._lock:
            asked, self._asked = self._asked, []
            while self._unasked and time.monotonic() - self._shown_at > self._unasked[0]:
                asked = [*asked, ""]
                self._unasked.pop(0)
            picture = self._picture() if asked else {}
        for view in asked:
            self._tell({"kind": "picture", "for": view, "n": self._sent, **picture})

    def _picture(self) -> dict[str, Any]:
        chars = PICTURE_CHARS // max(1, len(self._lanes))
        return {
            "lanes": [[number, lane.picture(chars)] for number, lane in self._lanes.items()],
            "curves": [[number, lane.samples] for number, lane in self._lanes.items()],
            **self._states(),
            "still": _still(self._now),
        }

    def _states(self) -> dict[str, Any]:
        now = self._now
        if now is None:
            return {}
        return {
            "at": round(now.elapsed_s, 2),
            "state": "stopping" if self._stopping else now.state,
            "note": now.note,
            "ranks": [
                [r.rank, r.kind, r.words, whole(r.rss_mib), r.device, whole(r.device_mib), r.attempt, r.node]
                for r in now.ranks
            ],
        }

    def _hear(self, _widget: object, content: Any, _buffers: object) -> None:
        """A message from a view, on whatever thread the kernel reads it."""
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "stop" and self._stop is not None and not self._over.is_set():
            self._stopping = True
            self._stop()
            self._tell({"kind": "heard"})
        elif kind == "hello":
            with self._lock:
                self._asked.append(str(content.get("view", "")))
            self._wake.set()

    def _tell(self, message: dict[str, Any]) -> None:
        """Send; a kernel or browser that has gone must not disturb the job, so one failure ends all sending."""
        if self._gone:
            return
        try:
            self.send(message)
        except Exception:
            self._gone = True

    def _keep(self, name: str, value: dict[str, Any]) -> None:
        """Set a synced trait; it keeps its value even where telling the browser fails."""
        try:
            setattr(self, name, value)
        except Exception:
            self._gone = True


def hear_clicks_while_busy(widget: Any) -> bool:
    """Let this widget's messages be read while a cell runs, where the kernel can; returns whether it can.

    JupyterLab sends a widget's messages to a subshell, a thread beside the one that runs cells. ipykernel 7 puts them
    back on the thread that last sent something, which is the busy one. Here they stay where the front end sends them.
    """
    comm: Any = getattr(widget, "comm", None)
    if not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True


def _ending(run: ShownRun) -> dict[str, Any]:
    """What is known once the job is over. Without the verdict nothing in it tells one failed rank from another."""
    table = {row.rank: row for row in rows(run.ranks, [r.rank for r in run.ranks if r.role == "culprit"], run.revealed)}
    ranks = [_ended_rank(rank, table[rank.rank], run.revealed) for rank in run.ranks]
    sentence, alike = (what_happened(run), run.culprit == "every rank") if run.revealed else ("", False)
    said = {"alike": alike, "note": " ".join(run.notes), "endings": ranks}
    if run.state == "passed" and not sentence:
        return {"over": True, **said, "still": None}
    diagnosis = _diagnosis(run.diagnosis) if run.revealed and run.diagnosis else None
    seen = {"sentence": sentence, "rows": [_row(row) for row in table.values()], "diagnosis": diagnosis}
    return {"over": True, **said, "still": seen}


def _still(now: Now | None) -> dict[str, Any] | None:
    """What was found when nothing moved; None while the job goes on."""
    if now is None or now.still is None:
        return None
    table = [_row(row) for row in now.still.rows]
    return {"sentence": now.still.sentence, "at": round(now.still.at_s, 2), "rows": table}


def _row(row: Row) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "name": row.name,
        "state": row.state,
        "tone": row.tone,
        "where": row.where,
        "collective": row.collective,
        "waits": row.waits,
        "silent": None if row.silent_s is None else round(row.silent_s, 1),
        "busy": row.busy,
        "stack": [_frame(frame) for frame in row.stack],
        "workers": [[_frame(frame) for frame in stack] for stack in row.workers],
    }


def _frame(frame: Frame) -> list[Any]:
    """[1 if the user's own, line, source, function, file]"""
    return [int(frame.own), frame.line, frame.source, frame.function, short_file(frame)]


def _diagnosis(found: Diagnosis) -> dict[str, Any]:
    said = [evidence.said for evidence in found.evidence][:MOST_EVIDENCE]
    about = {"name": found.name, "confidence": found.confidence, "title": found.title, "evidence": said}
    return {**about, "page": first_paragraph(found)}


def _ended_rank(rank: Rank, row: Row, revealed: bool) -> list[Any]:
    """[rank, role, words, type, message, line, peak MiB]; a role of "failed" names nobody."""
    failure, peak = rank.failure, whole(rank.peak_rss_mib)
    type_, message, line = (failure.type, failure.message, failure.line_text) if failure else ("", "", "")
    if revealed:
        words = row.words if row.silent_s is not None else rank.words
        return [rank.rank, rank.role, words, type_, message[:4_000], line, peak]
    passed = rank.exitcode == 0
    return [rank.rank, "passed" if passed else "failed", rank.plain_words, "", "", "", peak]
