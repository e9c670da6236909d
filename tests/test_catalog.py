"""The catalog: every page is whole, no two say the same, and `explain` prints them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ddpkit
from ddpkit.course.lab import lab, labs
from ddpkit.diagnosis.pages import KINDS, PLACES, NoSuchPage, Page, Signature, page, pages, read_pages

SECTIONS = ["What it means", "Cures", "Why it happens", "NCCL and gloo", "Read on"]
# What a verdict says that needs no page: there is nothing to explain, or the text of the ranks is asked first.
# Which signal it was has a page.
WITHOUT_A_PAGE = {"passed", "tie", "agent_failed", "sent_a_signal", "unknown"}


def page_text(head: str) -> str:
    return f'+++\nfamily = "Hangs"\n{head}\n+++\n\n## What it means\n\nSo.\n'


def ddpkit_explain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ddpkit")), "explain", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "100"})


@pytest.mark.parametrize("each", pages(), ids=lambda p: p.name)
def test_a_page_is_whole(each: Page) -> None:
    assert each.title and each.seen_with
    assert each.signatures or lab(each.name).expect in ("silent", "slow"), (
        "only what no message tells of has no signature"
    )
    headings = [line.removeprefix("## ") for line in each.text.splitlines() if line.startswith("## ")]
    assert headings == SECTIONS
    assert len(each.text.splitlines()) <= 60, "a page is read at 2 a.m."
    assert not [line for line in each.text.splitlines() if len(line) > 125]
    assert "Let's" not in each.text and "simply" not in each.text and "**" not in each.text.replace("***", "")


def test_every_folder_holds_a_page_or_a_lab_that_names_one() -> None:
    folder = Path(ddpkit.__file__).with_name("catalog")
    named, runnable = {p.name for p in pages()}, {one.name: one for one in labs()}
    for each in folder.iterdir():
        assert each.name in named or (runnable[each.name].page or each.name) in named, each.name


def test_a_page_links_its_labs_and_its_notebook() -> None:
    notebooks = {p.stem for p in (Path(ddpkit.__file__).parents[1] / "notebooks").glob("*.ipynb")}
    for each in pages():
        assert each.labs == tuple(sorted(one.name for one in labs() if (one.page or one.name) == each.name))
        assert not each.notebook or each.notebook in notebooks, each.name
        for shown in (str(each), each._repr_markdown_()):
            assert each.links in shown
    shown = page("unused_parameters")._repr_markdown_()
    assert 'FixBench("branch_by_rank")' in shown and "notebooks/02_reduction_error.ipynb" in shown
    assert page("gpu_xid").links == ""


def test_no_two_pages_share_a_signature_or_a_title() -> None:
    everything = [s for p in pages() for s in p.signatures]
    assert [s for s, number in Counter(everything).items() if number > 1] == []
    assert len({p.title for p in pages()}) == len(pages())


def test_every_verdict_that_tells_a_failure_has_its_page() -> None:
    told = {s.verdict for p in pages() for s in p.signatures if s.verdict}
    assert told == KINDS - WITHOUT_A_PAGE


@pytest.mark.parametrize("each", pages(), ids=lambda p: p.name)
def test_its_signatures_say_one_thing_each_where_it_is_looked_for(each: Page) -> None:
    for signature in each.signatures:
        assert sum(map(bool, (signature.text, signature.signal, signature.verdict))) == 1
        assert signature.where in ("", *PLACES) and signature.verdict in ("", *KINDS)
        assert signature.text or signature == Signature(signal=signature.signal, verdict=signature.verdict)
        assert signature.pattern.flags


def test_pages_are_found_by_their_folders(tmp_path: Path) -> None:
    for name in ("late", "early"):
        (tmp_path / name).mkdir()
        head = f'title = "{name}"\nseen_with = "t"\n[[signatures]]\ntext = \'{name}\''
        (tmp_path / name / "page.md").write_text(page_text(head))
    (tmp_path / "README").write_text("not a page")
    (tmp_path / "empty").mkdir()
    assert [p.title for p in read_pages(tmp_path)] == ["early", "late"]


@pytest.mark.parametrize(
    ("asked", "near"),
    [("unused_parameter", "unused_parameters"), ("oom_cuda", "out_of_memory_cuda"), ("nccl_errors", "nccl_error")],
)
def test_a_near_miss_is_answered_with_the_name(asked: str, near: str) -> None:
    with pytest.raises(NoSuchPage, match=f"has no failure '{asked}'. Did you mean .*{near}"):
        page(asked)


def test_every_lab_finds_the_page_of_its_failure() -> None:
    for one in labs():
        assert page(one.name).name in (one.name, one.page)
    assert page("one_rank_out_of_memory").name == "out_of_memory_cpu"


def test_a_name_from_nowhere_is_sent_to_the_list() -> None:
    with pytest.raises(NoSuchPage, match=r"has no failure 'qqqq'\. `ddpkit explain` lists all \d+"):
        page("qqqq")
    with pytest.raises(NoSuchPage):
        page("")


def test_explain_shows_markdown_in_a_notebook_and_text_elsewhere() -> None:
    found = ddpkit.explain("Unused-Parameters")
    assert found.name == "unused_parameters"
    assert found._repr_markdown_().startswith("# Parameters took no part in the loss")
    assert "seen with: torch 2.13.0+cpu, gloo" in found._repr_markdown_()
    assert repr(found).startswith("Parameters took no part in the loss")
    everything = ddpkit.explain()
    assert "| `killed` | A rank was killed by SIGKILL, and not by torchrun |" in everything._repr_markdown_()
    for family, count in Counter(each.family for each in pages()).items():
        assert count > 2 and f"\n{family}\n" in f"\n{everything!r}", f"a family of {count}: {family!r}"


def test_explain_in_a_terminal() -> None:
    done = ddpkit_explain("early_exit")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "A rank left with exit code 0 while others still waited for it\nearly_exit · seen with"
    )
    assert "What it means" in done.stdout and "##" not in done.stdout and "+++" not in done.stdout


def test_explain_without_a_name_lists_all() -> None:
    done = ddpkit_explain()
    assert done.returncode == 0
    assert all(p.name in done.stdout for p in pages())
    assert "A port is taken" in done.stdout


def test_explain_of_an_unknown_failure_is_one_sentence_and_exit_code_2() -> None:
    done = ddpkit_explain("unused_parameter")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ddpkit: explain: the catalog has no failure 'unused_parameter'. Did you mean")
    assert len(done.stderr.strip().splitlines()) == 1
