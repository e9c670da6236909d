"""Removes from a text what differs between two runs of a job: ports, pids, addresses, paths, colours."""

from __future__ import annotations

import re

_VARYING = (
    (re.compile(r"\x1b\[[\d;]*m"), ""),
    # gloo learns a peer's address when it has connected: until then it writes "[none]", or whatever is in that memory.
    (re.compile(r"(Connect timeout) \[[\w.:]*\](:\d+)?(\$-?\d+)?"), r"\1 [none]"),
    (re.compile(r"\[(127\.0\.0\.1|localhost|[0-9a-fA-F:.]+)\]:\d+"), r"[\1]:PORT"),
    (re.compile(r"\((localhost|127\.0\.0\.1), \d+\)"), r"(\1, PORT)"),
    (re.compile(r"\b(localhost|127\.0\.0\.1):\d+"), r"\1:PORT"),
    # torch's C++ log: `[W1121 10:49:44.810465318 TCPStore.cpp:340]`, and the pause before it retries.
    (re.compile(r"\[([WEIF])\d{3,4} \d\d:\d\d:\d\d\.\d+ "), r"[\1 "),
    (re.compile(r"\bdelay=\d+ms"), "delay=Nms"),
    (re.compile(r"/torch_\d+_\d+_\d+"), "/torch_N"),
    (re.compile(r"\bpid(\(s\))?([ :=]+)\d+"), r"pid\1\2N"),
    (re.compile(r"\b[Kk]illed process \d+"), "Killed process N"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"[^\s\"']*/\.ddpkit/runs/[^/\s]+/"), ""),
    (re.compile(r"/tmp/ipykernel_\d+/\d+\.py"), "the cell"),
    (re.compile(r"\S*/site-packages/"), ""),
    (re.compile(r"\[/__w/\S*?/third_party/"), "["),
    (re.compile(r"<ipython-input-[^>]*>"), "the cell"),
)
_ANNOUNCES = re.compile(
    r"terminated with the following error:$|^Caught \w+ in \w+ worker process \d+\.$|^CheckpointException ranks"
)


def stable(text: str) -> str:
    """`text` with what varies between runs replaced by fixed words."""
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text


def shortened(text: str, length: int = 160) -> str:
    """The first line of `text`, cut between words to `length` characters.

    If it only announces a child's exception, the last line is added; if it ends in a colon, the second, or the next three
    that have colons themselves, such as "Missing key(s) in state_dict: ..." and "Unexpected key(s) ...".
    """
    lines = text.strip().splitlines()
    first = lines[0].strip() if lines else ""
    if _ANNOUNCES.search(first) and len(lines) > 1:
        first = f"{first} {lines[-1].strip()}"
    elif first.endswith(":") and len(lines) > 1:
        rest = [line.strip() for line in lines[1:4] if ": " in line]
        if len(rest) > 1:
            return " ".join([first, *(_cut(line, length // 2) for line in rest)])
        first = f"{first} {lines[1].strip()}"
    return _cut(first, length)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    cut = text[: length - 1]
    return (cut.rpartition(" ")[0] or cut).rstrip(" .,:;") + " …"
