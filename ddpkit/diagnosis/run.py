"""Names the failure of a job from what its ranks wrote and the verdict over it: catalog x records, with the evidence.

The verdict (`verdict/culprit.py`) says who; this room says what, and shows the line it was told by. Only the ranks at fault are
asked for the cause. Where nothing in the catalog fits, "unknown" is the answer, with what to collect.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Literal

from ddpkit.runfolder import wire
from ddpkit.runfolder.failures import LEAVES
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import shortened, stable
from ddpkit.verdict.finding import Culprit, Verdict

from .pages import Page, Signature, page, pages

Confidence = Literal["certain", "likely", "unknown"]

UNKNOWN = "unknown"
HEALTHY = "healthy"
STDERR_TAIL_BYTES = 1 << 18
MOST_LINES = 8

# Which kind of signature wins where several fit, the more specific first; see `_weight`.
BY_TYPE_AND_TEXT, BY_TEXT, BY_GENERAL_TEXT, BY_SIGNAL, BY_VERDICT, BY_NOTHING_ELSE = range(6)

# The verdict is the whole story, whatever else stands in the logs: somebody ended the job or a process of it, or the store
# of a restarted job held addresses of ranks that are gone.
_SETTLED = {"ended", "agent_killed", "stopped_process", "stale_addresses"}
# The verdict tells the page, and what stands in the logs is evidence of it, if of anything.
_TELLS_THE_PAGE = {"init_elsewhere", "thread_died"}
# Where ddpkit itself ended a job that stood still, torchrun's log tells of that and of nothing else.
_TORCHRUN_KNOWS = {"agent_failed", "peer_lost", "gave_up", "unknown", ""}
# Nobody had failed: the ranks stood still. A loader's worker, which "loader_stuck" is about, may have failed, and stderr is
# all that tells of it.
_STANDSTILLS = {
    *("left_early", "never_joined", "unmatched", "no_key", "straggler", "mismatch", "ran_out", "init_waiting"),
    *("init_elsewhere", "stale_addresses", "all_waiting", "stuck", "busy", "silent"),
}
# These verdicts are complete without a rank at fault.
_NAMES_NOBODY = {"ended", "agent_killed", "timed_out"}


@dataclass(frozen=True)
class Evidence:
    """A line that was found: in `file` (relative to the run folder) at `line` (from 1), written by `rank` (None: torchrun)."""

    rank: int | None
    file: str
    line: int
    text: str

    @property
    def said(self) -> str:
        """`rank 1, stderr.log: ValueError: boom`. The log's folder and line number differ from run to run, and stay out."""
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        return f"{who}, {Path(self.file).name}: {shortened(stable(self.text))}"


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

    def __str__(self) -> str:
        head = f"{self.name} ({self.confidence}): {self.title}" if self.name != UNKNOWN else f"{UNKNOWN}: {self.title}"
        return "\n".join([head, *(f"  {label:<12} {text}" for label, text in self._rows())])

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
class _Words:
    """Text in which signatures are looked for: where it stands, and how near it is to the failure itself."""

    rank: int | None
    place: str
    file: str
    first_line: int
    type: str
    text: str
    distance: int

    def found(self, signature: Signature) -> Evidence | None:
        """The line in which `signature` matches, or None."""
        if not signature.text or not signature.looks_at(self.place) or (signature.type and signature.type != self.type):
            return None
        match = signature.pattern.search(self.text)
        if match is None:
            return None
        begin = self.text.rfind("\n", 0, match.start()) + 1
        end = self.text.find("\n", match.start())
        line = self.first_line + (self.text.count("\n", 0, begin) if self.place in ("stderr", "torchrun") else 0)
        return Evidence(self.rank, self.file, line, self.text[begin : end if end >= 0 else None].strip()[:2000])


@dataclass(frozen=True)
class _Match:
    page: Page
    signature: Signature
    weight: int
    words: _Words | None
    evidence: tuple[Evidence, ...]


def diagnose(ranks: Sequence[Rank], verdict: Verdict, torchrun_log: str = "") -> Diagnosis | None:
    """The diagnosis of a job whose last attempt ended as `ranks` tell and `verdict` judges; None where it passed."""
    kind: str = getattr(verdict, "kind", "")
    if kind == "passed" or (not kind and ranks and not verdict.sentence and all(r.exitcode == 0 for r in ranks)):
        return None
    at_fault = _at_fault(ranks, verdict)
    suspects = at_fault or [r for r in ranks if r.exitcode != 0 and verdict.roles.get(r.rank) != "passed"]
    if kind == "tie":
        suspects = [r for r in suspects if verdict.roles.get(r.rank, "own") == "own"]
    asked = [] if kind in _SETTLED else [w for r in suspects for w in _words_of(r)]
    if kind in _STANDSTILLS:
        # By what a rank left after it had held up the others is no cause of that.
        asked = [words for words in asked if words.type not in LEAVES]
    if kind == "told_by_others":
        # Where it came to a stand after its failure is no cause of that.
        asked = [words for words in asked if words.place != "native"]
    if not at_fault and kind in _TORCHRUN_KNOWS:
        asked.append(_Words(None, "torchrun", wire.AGENT_LOG, 1, "", torchrun_log, 99))
    died = [r for r in suspects if verdict.roles.get(r.rank) != "consequence"]
    if kind in _STANDSTILLS:
        # What raises in C++ as its peers are gone may then be aborted.
        died = [r for r in died if r.failure is None or r.failure.type == r.signal]
    if kind == "sent_a_signal":
        asked, died = [], [r for r in ranks if not r.told]
    unhurt = {r.rank for r in suspects if kind in _STANDSTILLS and r.failure is None}
    by_verdict = _by_verdict(kind, suspects, bool(at_fault))
    matches = [*_by_text(asked, unhurt), *_by_signal(died), *by_verdict]
    if kind in _TELLS_THE_PAGE:
        matches = [match for match in matches if match.page in [told.page for told in by_verdict]]
    best = min(matches, key=lambda m: (m.weight, m.words.distance if m.words else 0, m.page.name), default=None)
    others = [r for r in ranks if r not in at_fault and verdict.roles.get(r.rank) in ("consequence", "unknown")]
    return _diagnosis(best, matches, verdict, kind, others)


def _diagnosis(
    best: _Match | None, matches: list[_Match], verdict: Verdict, kind: str, others: list[Rank]
) -> Diagnosis:
    name, title = UNKNOWN, "No failure of the catalog fits what was written down."
    confidence: Confidence = "unknown"
    by_rank: dict[int | None, Evidence] = {}
    if best is not None:
        name, title = best.page.name, best.page.title
        confidence = "certain" if _is_certain(best, verdict, kind) else "likely"
        for match in matches:
            if match.page is best.page and match.weight == best.weight:
                for found in match.evidence:
                    by_rank.setdefault(found.rank, found)
    consequences = tuple(e for r in others if r.rank not in by_rank and (e := _consequence(r)))
    collect = _what_to_collect(kind, others) if best is None or kind in ("gave_up", "peer_lost") else ""
    evidence = tuple(by_rank.values())
    return Diagnosis(name, title, verdict.sentence, verdict.culprit, evidence, consequences, confidence, collect)


def _is_certain(best: _Match, verdict: Verdict, kind: str) -> bool:
    """Certain: a rank at fault said so itself, or died of it, or the verdict is complete in itself."""
    if best.weight == BY_VERDICT and kind in _NAMES_NOBODY:
        return True
    if kind == "agent_failed" and best.words and best.words.place == "torchrun":
        return True
    by_name = best.words is None or best.words.place == "failure" or best.signature.where in ("stderr", "native")
    return verdict.culprit is not None and by_name


def _at_fault(ranks: Sequence[Rank], verdict: Verdict) -> list[Rank]:
    culprit = verdict.culprit
    if culprit is None:
        return []
    if culprit == "every rank":
        return list(ranks)
    return [r for r in ranks if r.rank == culprit or (isinstance(culprit, tuple) and r.rank in culprit)]


def _weight(signature: Signature) -> int:
    """How specific a signature is. The smallest wins: text in an exception of one type, text, text that only says where
    something failed, the signal a rank died of, the kind of verdict; the user's own exception is what is left over."""
    if signature.text:
        return BY_GENERAL_TEXT if signature.general else BY_TYPE_AND_TEXT if signature.type else BY_TEXT
    if signature.signal:
        return BY_SIGNAL
    return BY_NOTHING_ELSE if signature.verdict == "own" else BY_VERDICT


def _by_text(asked: Sequence[_Words], unhurt: Collection[int]) -> list[_Match]:
    found = []
    for words in asked:
        for each in pages():
            for signature in each.signatures:
                if signature.consequence or not (evidence := words.found(signature)):
                    continue
                found.append(_Match(each, signature, _weight(signature), words, (_in_the_log(evidence, asked),)))
    return [m for m in found if m.words and _may_speak(m, found, unhurt)]


def _may_speak(match: _Match, found: Sequence[_Match], unhurt: Collection[int]) -> bool:
    """Whether a line on stderr may name the cause.

    A program prints errors that it has dealt with. So beside an exception that says itself what happened, stderr is
    heard only where that exception is a general one, or where the page asks for stderr by name. Of a rank that only held up
    the others, and is `unhurt`, no more is heard.
    """
    words = match.words
    if words is None or words.place != "stderr":
        return True
    if not words.type:
        return words.rank not in unhurt or match.signature.where == "stderr"
    own = [m for m in found if m.words and m.words.rank == words.rank and m.words.place == "failure"]
    return match.signature.where == "stderr" or any(m.weight == BY_GENERAL_TEXT for m in own)


def _in_the_log(evidence: Evidence, asked: Sequence[_Words]) -> Evidence:
    """The same line in the rank's own log, where a reader can open it; else where it was found."""
    for words in asked:
        if evidence.file.endswith(".json") and words.place == "stderr" and words.rank == evidence.rank:
            at = words.text.rfind(evidence.text) if evidence.text else -1
            if at >= 0:
                return Evidence(words.rank, words.file, words.first_line + words.text.count("\n", 0, at), evidence.text)
    return evidence


def _by_signal(suspects: Sequence[Rank]) -> list[_Match]:
    return [
        _Match(each, signature, BY_SIGNAL, None, (_died(rank),))
        for rank in suspects
        # By KeyboardInterrupt Python ends itself with SIGINT.
        if rank.signal and not rank.told and not (rank.failure and rank.failure.type == "KeyboardInterrupt")
        for each in pages()
        for signature in each.signatures
        if signature.signal == rank.signal.partition("+")[0]
    ]


def _died(rank: Rank) -> Evidence:
    return Evidence(rank.rank, _own_file(rank, wire.EXIT), 1, f'"signal": "{rank.signal}"')


def _by_verdict(kind: str, suspects: Sequence[Rank], named: bool) -> list[_Match]:
    own = [r for r in suspects if r.failure and r.failure.type != r.signal and (named or kind == "tie")]
    found = []
    for each in pages():
        for signature in each.signatures:
            if signature.verdict == "own" and own:
                found.append(_Match(each, signature, BY_NOTHING_ELSE, None, tuple(_raised(r) for r in own)))
            elif signature.verdict and signature.verdict == kind != "own":
                seen = tuple(e for r in suspects if named and (e := _last_seen(r)))
                found.append(_Match(each, signature, BY_VERDICT, None, seen))
    return found


def _raised(rank: Rank) -> Evidence:
    first = _failure_words(rank)[0]
    line = Evidence(rank.rank, first.file, 1, first.text.partition("\n")[0])
    return _in_the_log(line, _words_of(rank))


def _last_seen(rank: Rank) -> Evidence | None:
    """Where the rank was when its stack was taken; how it left, where it has no stack."""
    lines = rank.stack.splitlines()
    if rank.at and (rank.folder / wire.STACK).exists():
        frame = f'File "{rank.at.file}", line {rank.at.line}'
        number = next((i for i, text in enumerate(lines, 1) if frame in text), 0)
        if number:
            return Evidence(rank.rank, _own_file(rank, wire.STACK), number, lines[number - 1].strip())
    if rank.exitcode is not None:
        return Evidence(rank.rank, _own_file(rank, wire.EXIT), 1, f'"exitcode": {rank.exitcode}')
    return None


def _consequence(rank: Rank) -> Evidence | None:
    """What the rank said because of another's failure: the line that a page calls a consequence, else any that one knows."""
    words = _words_of(rank)
    known = [s for p in pages() for s in p.signatures if s.text and not s.general]
    for signature in sorted(known, key=lambda s: not s.consequence):
        for each in words:
            if found := each.found(signature):
                return _in_the_log(found, words)
    return _raised(rank) if rank.failure and rank.failure.type != rank.signal else None


def _words_of(rank: Rank) -> list[_Words]:
    """All that the rank said about its end: the exception, what it was raised from, and the end of its stderr."""
    words = _failure_words(rank)
    if rank.look and rank.look.inside:
        words.append(_Words(rank.rank, "native", _own_file(rank, wire.LOOK), 1, "", "\n".join(rank.look.inside), 10))
    # Nobody writes last words under SIGKILL: what stands there is older.
    if rank.log_folder and rank.signal != "SIGKILL":
        first_line, text = _tail(rank.log_folder / "stderr.log")
        file = str((rank.log_folder / "stderr.log").relative_to(_run_folder(rank)))
        raised = rank.failure.type if rank.failure and rank.failure.type != rank.signal else ""
        words.append(_Words(rank.rank, "stderr", file, first_line, raised, text, 50))
    return words


def _failure_words(rank: Rank) -> list[_Words]:
    file = _own_file(rank, wire.FAILURE)
    if rank.failure is None:
        if not rank.exitcode or rank.signal:
            return []
        text = f'"exitcode": {rank.exitcode}'
        return [_Words(rank.rank, "failure", _own_file(rank, wire.EXIT), 1, "", text, 0)]
    if rank.failure.type == rank.signal:
        return []
    said = [(rank.failure.type, rank.failure.message), *rank.failure.chain]
    where = rank.failure.where
    if said[0] == ("KeyboardInterrupt", "") and where and where.source.startswith("raise"):
        # What Ctrl-C raises comes at whatever line the program is.
        said[0] = ("KeyboardInterrupt", "raised by the program")
    return [
        _Words(rank.rank, "failure", file, 1, kind, f"{kind}: {text}" if text else kind, distance)
        for distance, (kind, text) in enumerate(said)
    ]


def _own_file(rank: Rank, name: str) -> str:
    return str((rank.folder / name).relative_to(_run_folder(rank)))


def _run_folder(rank: Rank) -> Path:
    return rank.folder.parents[2]


def _tail(path: Path) -> tuple[int, str]:
    """The number of the first whole line in the last 256 KiB of a log, and their text."""
    try:
        with open(path, "rb") as file:
            cut = max(0, file.seek(0, 2) - STDERR_TAIL_BYTES)
            file.seek(0)
            lines = sum(file.read(min(1 << 20, cut - at)).count(b"\n") for at in range(0, cut, 1 << 20))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return 1, ""
    if cut:
        _, _, text = text.partition("\n")
        lines += 1
    return lines + 1, text


def _what_to_collect(kind: str, others: Sequence[Rank]) -> str:
    if kind == "agent_failed":
        return "Read run.torchrun_log: torchrun itself failed, and its last lines say at what."
    again = "Launch again with stall=5, stop_on_stall=True: every rank's stack is then written while it still waits."
    if any("NCCL" in w.text for r in others for w in _words_of(r)):
        again += " Add env={'TORCH_FR_BUFFER_SIZE': '2000', 'TORCH_NCCL_DUMP_ON_TIMEOUT': '1', 'NCCL_DEBUG': 'WARN'}: "
        again += "the flight recorder then says which collective each rank had reached."
    elif kind not in ("gave_up", "peer_lost", "all_waiting", "stuck", "init_waiting", "timed_out"):
        again = "Look at run.ranks[i].stderr and .stack of each rank; launch again with PYTHONFAULTHANDLER=1 in env=."
    return again


def of_replicas(said: str) -> Diagnosis:
    """The diagnosis of a job that passed with replicas that are `said`, such as "0.41 apart, first in head.weight"."""
    name = "replicas_differ"
    return Diagnosis(name, page(name).title, f"The replicas are {said}.", None, (), (), "certain", "")
