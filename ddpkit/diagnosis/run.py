"""Names the failure of a job from its verdict and what its ranks wrote, by the catalog, and shows the lines that tell it.

The verdict says who, the diagnosis says what: only the ranks at fault are asked for the cause. Where no page fits, the answer is
"unknown", with what to collect.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Literal

from ddpkit.runfolder import wire
from ddpkit.runfolder.failures import LEAVES
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import stable
from ddpkit.verdict.finding import Culprit, Verdict

from .evidence import Evidence, Words, consequence, died, exception_of, in_the_log, last_seen, raised, words_of
from .pages import Page, Signature, all_signatures, page

Confidence = Literal["certain", "likely", "unknown"]

UNKNOWN = "unknown"
HEALTHY = "healthy"
MOST_LINES = 8

# Where several signatures match, the smallest wins: text in an exception of one type, text, text that only says where
# something failed, the signal that killed a rank, the verdict; the user's own exception is what is left.
BY_TYPE_AND_TEXT, BY_TEXT, BY_GENERAL_TEXT, BY_SIGNAL, BY_VERDICT, BY_NOTHING_ELSE = range(6)

# The verdict is the whole story, whatever the logs say.
_SETTLED = {"ended", "agent_killed", "stopped_process", "stale_addresses", "thread_died", "sent_a_signal", "node_lost"}
# The ranks only stood still. "loader_stuck" is not among them: stderr is all that tells of a loader's worker that failed.
_STANDSTILLS = set(
    "left_early never_joined unmatched no_key straggler mismatch init_waiting init_elsewhere stale_addresses "
    "all_waiting busy silent".split()
)
# torchrun's log may tell the cause. Where ddpkit ended the job itself, that log tells of nothing else.
_TORCHRUN_KNOWS = {"agent_failed", "peer_lost", "gave_up", "unknown"}
# These verdicts are complete without a rank at fault.
_NAMES_NOBODY = {"ended", "agent_killed", "timed_out", "agent_failed"}


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What went wrong: `name` and `title` of the catalog's page, the verdict's `sentence`, and the lines that tell it.

    `rank` is who is at fault, as in `Run.culprit`. `consequences` are what other ranks said because of it; `collect` is
    what to gather before the next attempt, "" where the cause is known.
    """

    name: str
    title: str
    sentence: str
    rank: Culprit
    evidence: tuple[Evidence, ...]
    consequences: tuple[Evidence, ...]
    confidence: Confidence
    collect: str

    @property
    def head(self) -> str:
        """`early_exit (certain): A rank left ...`"""
        return (
            f"{self.name}: {self.title}" if self.name == UNKNOWN else f"{self.name} ({self.confidence}): {self.title}"
        )

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"  {label:<12} {text}" for label, text in self._rows())])

    __repr__ = __str__

    def json(self) -> str:
        """All of it as JSON: name, title, sentence, rank, evidence and consequences with file and line, confidence, collect."""
        return json.dumps(asdict(self), indent=1)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="text-align:left">{label}</td><td style="text-align:left">{escape(text)}</td></tr>'
            for label, text in self._rows()
        )
        head = f"<b>{escape(self.name)}</b> ({self.confidence}): {escape(self.title)}"
        return f'<div class="ddpkit-diagnosis"><div>{head}</div><table>{rows}</table></div>'

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.sentence:
            yield "verdict", stable(self.sentence)
        for label, found in (("evidence", self.evidence), ("consequence", self.consequences)):
            yield from ((label, e.said) for e in found[:MOST_LINES])
            if len(found) > MOST_LINES:
                yield label, f"and {len(found) - MOST_LINES} more ranks alike"
        if self.collect:
            yield "collect", self.collect
        if self.name not in (UNKNOWN, HEALTHY):
            yield "page", f"ddpkit explain {self.name}"


@dataclass(frozen=True)
class _Match:
    page: Page
    signature: Signature
    evidence: tuple[Evidence, ...]
    words: Words = field(default_factory=Words)

    @property
    def weight(self) -> int:
        """How specific it is, the smaller the more; see `BY_TYPE_AND_TEXT`."""
        signature = self.signature
        if signature.text:
            return BY_GENERAL_TEXT if signature.general else BY_TYPE_AND_TEXT if signature.type else BY_TEXT
        if signature.signal:
            return BY_SIGNAL
        return BY_NOTHING_ELSE if signature.verdict == "own" else BY_VERDICT


def diagnose(ranks: Sequence[Rank], verdict: Verdict, torchrun_log: str = "") -> Diagnosis | None:
    """The diagnosis of a job whose last attempt ended as `ranks` tell and `verdict` judges; None where it passed."""
    if verdict.kind == "passed":
        return None
    suspects = _suspects(ranks, verdict)
    asked = _asked(suspects, verdict, torchrun_log)
    matches = [*_by_text(asked), *_by_signal(suspects, verdict), *_by_verdict(suspects, verdict)]
    if verdict.kind == "mismatch" and verdict.culprit is None:
        # What a rank makes of the bytes of another collective, such as a size of 4e18, has no meaning.
        matches = [match for match in matches if any(each.verdict == "mismatch" for each in match.page.signatures)]
    best = min(matches, key=lambda match: (match.weight, match.words.distance, match.page.name), default=None)
    others = [rank for rank in ranks if verdict.roles[rank.rank] in ("consequence", "unknown")]
    return _diagnosis(best, matches, verdict, others)


def _diagnosis(best: _Match | None, matches: list[_Match], verdict: Verdict, others: list[Rank]) -> Diagnosis:
    name, title = UNKNOWN, "No failure of the catalog fits what was written down."
    confidence: Confidence = "unknown"
    by_rank: dict[int | None, Evidence] = {}
    if best is not None:
        name, title = best.page.name, best.page.title
        confidence = "certain" if _is_certain(best, verdict) else "likely"
        for match in matches:
            if match.page is best.page and match.weight == best.weight:
                for found in match.evidence:
                    by_rank.setdefault(found.rank, found)
    consequences = tuple(e for r in others if r.rank not in by_rank and (e := consequence(r)))
    collect = _what_to_collect(verdict.kind, others) if best is None or verdict.kind in ("gave_up", "peer_lost") else ""
    evidence = tuple(by_rank.values())
    return Diagnosis(name, title, verdict.sentence, verdict.culprit, evidence, consequences, confidence, collect)


def _is_certain(best: _Match, verdict: Verdict) -> bool:
    """Whether a rank at fault said so itself or died of it; of the verdict alone, whether that is certain."""
    if best.weight >= BY_VERDICT and not verdict.certain:
        return False
    if verdict.kind in _NAMES_NOBODY:
        return best.weight == BY_VERDICT or best.words.place == "torchrun"
    said_so = best.words.place in ("", "failure") or best.signature.where in ("stderr", "native")
    return verdict.culprit is not None and said_so


def _suspects(ranks: Sequence[Rank], verdict: Verdict) -> list[Rank]:
    """The ranks at fault; where none is named, those that failed by themselves, else all that did not pass."""
    for role in ("culprit", "own"):
        if found := [rank for rank in ranks if verdict.roles[rank.rank] == role]:
            return found
    return [rank for rank in ranks if rank.exitcode != 0 and verdict.roles[rank.rank] != "passed"]


def _asked(suspects: Sequence[Rank], verdict: Verdict, torchrun_log: str) -> list[Words]:
    """What is searched for the cause: the words of the suspects, or torchrun's log."""
    asked = []
    for rank in () if verdict.kind in _SETTLED else suspects:
        for words in words_of(rank):
            # Why a rank stood still is not told by how it left later, nor by errors that it printed and dealt with.
            no_reason = words.type in LEAVES or (words.place == "stderr" and rank.failure is None)
            if verdict.kind not in _STANDSTILLS or not no_reason:
                asked.append(words)
    if verdict.culprit is None and verdict.kind in _TORCHRUN_KNOWS:
        asked.append(Words(None, "torchrun", wire.AGENT_LOG, 1, "", torchrun_log, 99))
    return asked


def _by_text(asked: Sequence[Words]) -> list[_Match]:
    found = []
    for words in asked:
        for each, signature in all_signatures():
            if not signature.consequence and (evidence := words.found(signature)):
                found.append(_Match(each, signature, (in_the_log(evidence, asked),), words))
    return [match for match in found if _may_speak(match, found)]


def _may_speak(match: _Match, found: Sequence[_Match]) -> bool:
    """Whether a line on stderr may name the cause.

    A program prints errors that it has dealt with. So beside an exception that says what happened, stderr counts only where
    the page asks for it by name.
    """
    if match.words.place != "stderr" or not match.words.type or match.signature.where == "stderr":
        return True
    for other in found:
        of_rank = other.words.place == "failure" and other.words.rank == match.words.rank
        if of_rank and other.weight == BY_GENERAL_TEXT:
            return True
    return False


def _by_signal(suspects: Sequence[Rank], verdict: Verdict) -> list[_Match]:
    """The pages of the signals that killed ranks. After an exception a signal is not the cause: C++ may abort then."""
    found = []
    for rank in suspects:
        if not rank.signal or rank.told or exception_of(rank) or verdict.roles[rank.rank] == "consequence":
            continue
        for each, signature in all_signatures():
            if signature.signal == rank.signal.partition("+")[0]:
                found.append(_Match(each, signature, (died(rank),)))
    return found


def _by_verdict(suspects: Sequence[Rank], verdict: Verdict) -> list[_Match]:
    own, seen = [], []
    for rank in suspects:
        if exception_of(rank) and (verdict.culprit is not None or verdict.kind == "tie"):
            own.append(raised(rank))
        if verdict.culprit is not None and (line := last_seen(rank)):
            seen.append(line)
    found = []
    for each, signature in all_signatures():
        if signature.verdict == "own" and own:
            found.append(_Match(each, signature, tuple(own)))
        elif signature.verdict and signature.verdict == verdict.kind != "own":
            found.append(_Match(each, signature, tuple(own if verdict.kind == "too_early" else seen)))
    return found


def _what_to_collect(kind: str, others: Sequence[Rank]) -> str:
    if kind == "agent_failed":
        return "Read run.torchrun_log: torchrun itself failed, and its last lines say at what."
    again = "Launch again with stall=5, stop_on_stall=True: every rank's stack is then written while it still waits."
    if any("NCCL" in w.text for r in others for w in words_of(r)):
        again += " Add env={'TORCH_FR_BUFFER_SIZE': '2000', 'TORCH_NCCL_DUMP_ON_TIMEOUT': '1', 'NCCL_DEBUG': 'WARN'}: "
        again += "the flight recorder then says which collective each rank had reached."
    elif kind not in ("gave_up", "peer_lost", "all_waiting", "init_waiting", "timed_out"):
        again = "Look at run.ranks[i].stderr and .stack of each rank; launch again with PYTHONFAULTHANDLER=1 in env=."
    return again


def of_replicas(said: str) -> Diagnosis:
    """The diagnosis of a job that passed with replicas that are `said`, such as "0.41 apart, first in head.weight"."""
    name = "replicas_differ"
    return Diagnosis(name, page(name).title, f"The replicas are {said}.", None, (), (), "certain", "")
