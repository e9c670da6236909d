"""The lines that tell of a failure: what a rank wrote about its end, and where a signature of the catalog matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpkit.runfolder import wire
from ddpkit.runfolder.failures import Failure
from ddpkit.runfolder.ranks import Rank
from ddpkit.runfolder.stable import shortened, stable

from .pages import Signature, all_signatures

STDERR_TAIL = 1 << 18  # characters


@dataclass(frozen=True)
class Evidence:
    """A line that was found: in `file` (relative to the run folder) at `line` (from 1), written by `rank` (None: torchrun)."""

    rank: int | None
    file: str
    line: int
    text: str

    @property
    def said(self) -> str:
        """`rank 1, stderr.log: ValueError: boom`. The log's folder and line number differ from run to run, so they stay out."""
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        return f"{who}, {Path(self.file).name}: {shortened(stable(self.text))}"


@dataclass(frozen=True)
class Words:
    """A text to search for signatures: written by `rank` in `file` from `first_line` on, at `place`, one of `pages.PLACES`.

    `type` is the exception that it is about, `distance` how far it is from the failure itself: the smaller, the nearer.
    """

    rank: int | None = None
    place: str = ""
    file: str = ""
    first_line: int = 1
    type: str = ""
    text: str = ""
    distance: int = 0

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


def exception_of(rank: Rank) -> Failure | None:
    """How the rank failed by itself, but for a death by signal, of which the record says nothing more than the signal."""
    return rank.failure if rank.failure and rank.failure.type != rank.signal else None


def words_of(rank: Rank) -> list[Words]:
    """What the rank wrote about its end: the exception, what it was raised from, and the end of its stderr."""
    words = _failure_words(rank)
    if rank.look and rank.look.inside:
        words.append(Words(rank.rank, "native", _own_file(rank, wire.LOOK), 1, "", "\n".join(rank.look.inside), 10))
    # SIGKILL leaves no time for last words: what stderr holds then is older.
    if rank.log_folder and rank.signal != "SIGKILL":
        text, failure = rank.stderr, exception_of(rank)
        cut = max(0, len(text) - STDERR_TAIL)
        file = str((rank.log_folder / "stderr.log").relative_to(rank.folder.parents[2]))
        first_line = text.count("\n", 0, cut) + 1
        words.append(Words(rank.rank, "stderr", file, first_line, failure.type if failure else "", text[cut:], 50))
    return words


def _failure_words(rank: Rank) -> list[Words]:
    failure = exception_of(rank)
    if failure is None:
        if not rank.exitcode or rank.signal:
            return []
        return [Words(rank.rank, "failure", _own_file(rank, wire.EXIT), 1, "", f'"exitcode": {rank.exitcode}', 0)]
    chain = [(failure.type, failure.message), *failure.chain]
    if chain[0] == ("KeyboardInterrupt", "") and failure.where and failure.where.source.startswith("raise"):
        # Ctrl-C raises it at whatever line the program is; this one comes from the program.
        chain[0] = ("KeyboardInterrupt", "raised by the program")
    words = []
    for distance, (kind, message) in enumerate(chain):
        text = f"{kind}: {message}" if message else kind
        words.append(Words(rank.rank, "failure", _own_file(rank, wire.FAILURE), 1, kind, text, distance))
    return words


def in_the_log(evidence: Evidence, asked: Sequence[Words]) -> Evidence:
    """The same line in the rank's own log, where a reader can open it; else as it was found."""
    for words in asked:
        if evidence.file.endswith(".json") and words.place == "stderr" and words.rank == evidence.rank:
            at = words.text.rfind(evidence.text) if evidence.text else -1
            if at >= 0:
                return Evidence(words.rank, words.file, words.first_line + words.text.count("\n", 0, at), evidence.text)
    return evidence


def died(rank: Rank) -> Evidence:
    """The signal in the record of how the rank ended."""
    return Evidence(rank.rank, _own_file(rank, wire.EXIT), 1, f'"signal": "{rank.signal}"')


def raised(rank: Rank) -> Evidence:
    """The first line of the exception that the rank raised."""
    words = words_of(rank)
    return in_the_log(Evidence(rank.rank, words[0].file, 1, words[0].text.partition("\n")[0]), words)


def last_seen(rank: Rank) -> Evidence | None:
    """The rank's line in its stack; without a stack, how it ended."""
    if rank.at and (rank.folder / wire.STACK).exists():
        frame = f'File "{rank.at.file}", line {rank.at.line}'
        for number, text in enumerate(rank.stack.splitlines(), 1):
            if frame in text:
                return Evidence(rank.rank, _own_file(rank, wire.STACK), number, text.strip())
    if rank.exitcode is not None:
        return Evidence(rank.rank, _own_file(rank, wire.EXIT), 1, f'"exitcode": {rank.exitcode}')
    return None


def consequence(rank: Rank) -> Evidence | None:
    """What the rank said because of another one's failure: a line that a page calls a consequence, else one that it knows."""
    words = words_of(rank)
    known = [signature for _, signature in all_signatures() if signature.text and not signature.general]
    for signature in sorted(known, key=lambda s: not s.consequence):
        for each in words:
            if found := each.found(signature):
                return in_the_log(found, words)
    return raised(rank) if exception_of(rank) else None


def _own_file(rank: Rank, name: str) -> str:
    return str((rank.folder / name).relative_to(rank.folder.parents[2]))
