"""A real JupyterLab, 4 or 3, in a real browser: lanes fill while a job runs, Stop works in a running cell, notebook 00 runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import free_port, left_after
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from ddpkit.course.lab import lab as find_lab
from ddpkit.course.student import without_outputs
from ddpkit.runfolder import wire

# One worker runs them all, with one server and one browser.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.xdist_group("browser")]

ROOT = Path(__file__).parents[1]
COURSE = [
    p for p in sorted((ROOT / "notebooks").glob("*.ipynb")) if p.name[:2] in ("02", "03", "04", "05", "06", "07", "09")
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = "--no-sandbox --disable-gpu --disable-quic --disable-background-networking --disable-component-update --disable-sync"
PATIENCE_MS = 120_000
# A kernel of ipykernel 6 hears no widget while a cell runs.
SUBSHELLS = int(metadata.version("ipykernel").split(".")[0]) >= 7
LONG = """
import ddpkit
def talk():
    import time, torch, torch.distributed as dist
    from ddpkit.rank import setup
    with setup() as here:
        for step in range(10_000):
            print(f"rank {here.rank} at step {step}", flush=True)
            dist.barrier()
            time.sleep(0.1)
run = ddpkit.launch(talk)
print("state:", run.state)
"""
FAILS = """%%torchrun --nproc-per-node 2 --as broken --timeout 100
import sys, torch, torch.distributed as dist
from ddpkit.rank import setup
with setup() as here:
    for step in range(3):
        print(f"step {step} loss {1 / (step + 1):.3f}")
        print("<script>document.title = 'stolen'</script>")
        print("a warning of no weight", file=sys.stderr)
        dist.barrier()
    if here.rank == 1:
        raise ValueError("boom at step 3")
    dist.all_reduce(torch.ones(3))
"""


STALLS = """%%torchrun --nproc-per-node 2 --as training --stall 3 --timeout 600
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
net = DDP(torch.nn.Linear(8, 1))

def load_batch(step):
    while rank == 1 and step == 3 and not os.path.exists("FILE"):
        time.sleep(0.2)
    return torch.ones(4, 8)

for step in range(40):
    net(load_batch(step)).sum().backward()
    print(f"step {step}", flush=True)
    time.sleep(0.2 if step > 2 else 0)
"""


# What reaches over the right edge of the bench and cannot be scrolled to.
STICKS_OUT = """bench => {
  const edge = bench.getBoundingClientRect().right + 1, cut = e => getComputedStyle(e).overflowX !== 'visible'
  const scrolled = e => { for (let p = e.parentElement; p !== bench; p = p.parentElement) if (cut(p)) return true }
  const wide = e => e.getBoundingClientRect().right > edge && !scrolled(e)
  return [...bench.querySelectorAll('*')].filter(wide).map(e => e.className)
}"""


class Lab:
    """A JupyterLab server of this environment, and below its `root` the folder in which a test has its notebooks."""

    def __init__(self, root: Path, shots: Path) -> None:
        self.root = self.folder = root
        self.token = uuid.uuid4().hex
        self.port = free_port()
        settings = [f"--port={self.port}", f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={root}"]
        quiet = ["--no-browser", "--LabApp.news_url=None", "--ServerApp.port_retries=0", "--expose-app-in-browser"]
        as_root = ["--allow-root"] if os.geteuid() == 0 else []
        notices = root / ".jupyter/JUPYTER_CONFIG_DIR/lab/user-settings/@jupyterlab/apputils-extension"
        notices.mkdir(parents=True)
        (notices / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
        # Every cell of a notebook is there, also those far below.
        tracker = notices.parent / "notebook-extension"
        tracker.mkdir()
        (tracker / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
        own = {
            name: str(root / ".jupyter" / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        }
        with open(shots / "jupyterlab.log", "ab") as log:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *settings, *quiet, *as_root],
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
            )
        self.wait_until_up()

    def wait_until_up(self) -> None:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api", timeout=2)
                return
            except OSError:
                assert time.monotonic() < until and self.server.poll() is None, "JupyterLab does not start"
                time.sleep(0.2)

    def write(self, name: str, cells: list[str]) -> None:
        """A notebook of these code cells."""
        blank: dict[str, Any] = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
        spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        found = [{**blank, "id": f"cell-{i}", "source": c.strip()} for i, c in enumerate(cells)]
        text = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": spec}, "cells": found}
        (self.folder / name).write_text(json.dumps(text))

    def open(self, page: Any, name: str) -> None:
        """Open the notebook in a workspace of its own and wait until its kernel is idle."""
        path = f"workspaces/{uuid.uuid4().hex[:8]}/tree/{self.folder.name}/{name}"
        page.goto(f"http://127.0.0.1:{self.port}/lab/{path}?token={self.token}")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=PATIENCE_MS)
        page.wait_for_selector(
            ".jp-NotebookPanel .jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=PATIENCE_MS
        )
        # Until its connection to the kernel has settled JupyterLab may drop a run, or the widget that a run shows.
        page.evaluate(
            """async () => {
                const context = jupyterapp.shell.currentWidget.sessionContext;
                await context.ready;
                await context.session.kernel.info;
                for (let i = 0; i < 2; i++) await context.session.kernel.requestCommInfo({});
            }"""
        )

    def end_kernels(self) -> None:
        """Shut the kernels down over the server's own interface."""
        sessions = f"http://127.0.0.1:{self.port}/api/sessions"
        authorized = {"Authorization": f"token {self.token}"}
        with urllib.request.urlopen(urllib.request.Request(sessions, headers=authorized), timeout=60) as found:
            numbers = [session["id"] for session in json.load(found)]
        for number in numbers:
            end = urllib.request.Request(f"{sessions}/{number}", headers=authorized, method="DELETE")
            urllib.request.urlopen(end, timeout=60).close()

    def close(self) -> None:
        self.server.terminate()
        self.server.wait(60)


@pytest.fixture(scope="module")
def shots() -> Path:
    """Where screenshots go, for somebody to look at."""
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shots: Path) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(wire.ENV_HOME, raising=False)
        started = Lab(tmp_path_factory.mktemp("lab"), shots)
    yield started
    started.close()


@pytest.fixture
def lab(server: Lab) -> Iterator[Lab]:
    server.folder = server.root / uuid.uuid4().hex[:8]
    server.folder.mkdir()
    yield server
    server.end_kernels()
    left = left_after(server.folder, 20)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: install Debian's package chromium to run the browser tests")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, shots: Path) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 1280, "height": 1000})
    opened.set_default_timeout(PATIENCE_MS)
    yield opened
    # pytest shows this where the test failed.
    print(*opened.locator("#jp-main-dock-panel").all_inner_texts())
    opened.screenshot(path=shots / "last.png")
    opened.close()


def run_cell(page: Any, index: int) -> None:
    """Run the cell; pressed again while JupyterLab, still settling, has not taken the key."""
    prompt = page.locator(".jp-CodeCell").nth(index).locator(".jp-InputPrompt")
    for _ in range(20):
        page.locator(".jp-CodeCell .jp-InputArea-editor").nth(index).click()
        page.keyboard.press("Shift+Enter")
        for _ in range(10):
            if prompt.inner_text().strip() not in ("[ ]:", "[]:", ""):
                return
            page.wait_for_timeout(200)
    raise AssertionError(f"JupyterLab does not run cell {index}")


def lane(page: Any, rank: int) -> Any:
    return page.get_by_role("log", name=re.compile(f"output of rank {rank}"))


def wait_for_text(page: Any, locator: Any, text: str) -> None:
    """Return when `locator` holds `text`; fails after the page's patience."""
    locator.filter(has_text=text).first.wait_for(timeout=PATIENCE_MS)


def test_stop_works_while_the_launching_cell_runs(lab: Lab, page: Any, shots: Path) -> None:
    lab.write("long.ipynb", [LONG])
    lab.open(page, "long.ipynb")
    run_cell(page, 0)
    for rank in (0, 1):
        wait_for_text(page, lane(page, rank), f"rank {rank} at step 20")
    assert page.locator(".jp-InputPrompt", has_text="[*]").count() == 1, "the cell had ended before Stop was pressed"
    assert "MiB" in page.locator(".ddpkit").inner_text()
    page.screenshot(path=shots / "live-mid-run.png")
    stop = page.get_by_role("button", name="Stop")
    if not SUBSHELLS:
        assert "its own interrupt (■ in the toolbar) stops the job at once" in (stop.get_attribute("title") or "")
        stop = page.locator(".jp-NotebookPanel-toolbar button[title^='Interrupt']")
    before = time.monotonic()
    stop.click()
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "state: stopped")
    assert time.monotonic() - before < 10
    wait_for_text(page, page.locator(".ddpkit"), "stopped")
    page.screenshot(path=shots / "live-stopped.png")


def test_a_rank_that_saves_when_it_is_stopped_is_shown_and_ended_by_a_second_stop(lab: Lab, page: Any) -> None:
    saves = "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: time.sleep(1000))"
    saves += "\nprint('rank', os.environ['RANK'], 'works', flush=True)\ntime.sleep(1000)"
    lab.write(
        "saves.ipynb", ["%load_ext ddpkit", f"%%torchrun --nproc-per-node 2 --as run\n{saves}", "print(run.state)"]
    )
    lab.open(page, "saves.ipynb")
    for cell in (0, 1, 2):
        run_cell(page, cell)
    for rank in (0, 1):
        wait_for_text(page, lane(page, rank), f"rank {rank} works")
    stop = page.get_by_role("button", name=re.compile("^Stop"))
    if not SUBSHELLS:
        stop = page.locator(".jp-NotebookPanel-toolbar button[title^='Interrupt']")
    stop.click()
    wait_for_text(page, page.locator(".ddpkit"), "Stop again to end it at once.")
    assert re.search(r"handles SIGTERM, \d\d s left", page.locator(".ddpkit").inner_text())
    before = time.monotonic()
    stop.click()
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "stopped")
    assert time.monotonic() - before < 10


def test_a_failed_job_shows_who_is_at_fault_and_runs_no_markup(lab: Lab, page: Any, shots: Path) -> None:
    lab.write("fails.ipynb", ["%load_ext ddpkit", FAILS])
    lab.open(page, "fails.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)
    wait_for_text(page, page.locator(".ddpkit"), "Rank 1 raised ValueError: boom at step 3")
    wait_for_text(page, page.locator(".ddpkit"), "at fault")
    wait_for_text(page, lane(page, 0), "consequence")
    assert "<script>document.title = 'stolen'</script>" in lane(page, 0).inner_text()
    assert "stolen" not in page.title()
    page.screenshot(path=shots / "live-failed.png")
    page.set_viewport_size({"width": 800, "height": 1000})
    page.screenshot(path=shots / "live-failed-800px.png")
    lanes = [lane(page, r).bounding_box() for r in (0, 1)]
    assert lanes[1]["y"] >= lanes[0]["y"] + lanes[0]["height"], "lanes do not stack at 800 px"


def test_a_standstill_shows_who_holds_it_up_and_is_withdrawn(lab: Lab, page: Any, shots: Path) -> None:
    go = lab.folder / "go"
    lab.write("stalls.ipynb", ["%load_ext ddpkit", STALLS.replace("FILE", str(go)), "training.plot()"])
    lab.open(page, "stalls.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)
    shown = page.locator(".ddpkit")
    wait_for_text(page, shown, "Rank 1 has not joined all_reduce")
    rows = shown.locator(".ddp-row")
    assert rows.count() == 2
    assert (
        "in all_reduce #" in rows.nth(0).inner_text() and "line 16: net(load_batch(step))" in rows.nth(0).inner_text()
    )
    assert "sits idle" in rows.nth(1).inner_text() and "holds up the rest" in rows.nth(1).inner_text()
    waited = rows.nth(0).locator(".ddp-number").first
    before = waited.inner_text()
    stack = rows.nth(1).locator(".ddp-own")
    assert not stack.first.is_visible()
    rows.nth(1).locator("summary").first.focus()
    page.keyboard.press("Enter")
    stack.first.wait_for()
    assert "load_batch" in stack.first.inner_text() and "<module>" in stack.last.inner_text()
    rows.nth(0).locator("summary").first.click()
    rows.nth(0).locator(".ddp-whole summary").click()
    assert "torch/autograd" in rows.nth(0).inner_text()
    page.wait_for_function("before => document.querySelector('.ddp-row .ddp-number').innerText !== before", arg=before)
    shoot_all(page, shots, "live-standstill")
    go.touch()
    wait_for_text(page, shown, "The job goes on by itself.")
    assert rows.count() == 0 and "has not joined" not in shown.inner_text()
    page.screenshot(path=shots / "live-standstill-withdrawn.png")
    wait_for_text(page, shown, "passed")
    assert not shown.locator(".ddp-evidence").is_visible()
    run_cell(page, 2)
    page.locator(".jp-RenderedImage img").wait_for()
    page.locator(".jp-RenderedImage img").scroll_into_view_if_needed()
    page.screenshot(path=shots / "figure-passed.png")


TABLE = """\
┏━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┳━━━━━━━┳━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━┓
┃   ┃ Name          ┃ Type               ┃ Params ┃ Mode  ┃ FLOPs ┃       In sizes ┃      Out sizes ┃
┡━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━╇━━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━┩
│ 0 │ encoder       │ TransformerEncoder │  1.2 M │ train │     0 │   [4, 16, 128] │   [4, 16, 128] │
└───┴───────────────┴────────────────────┴────────┴───────┴───────┴────────────────┴────────────────┘
  | Name  | Type   | Params | Mode  | FLOPs | In sizes | Out sizes | a further column of this table
----------------------------------------------------------------------------------------------------
+------------------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15         CUDA Version: 12.4           |"""
PROSE = """\
Epoch 0/1 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━ 10/10 0:00:01 • 0:00:00 12.31it/s v_num: 0 train_loss: 0.123
Epoch 1:  50%|████████████████████████          | 5/10 [00:01<00:01,  4.51it/s, v_num=0, train_loss=0.12300]
2026-01-01 12:00:00.000 | INFO     | __main__:main:12 - a message of a logger that is longer than the lane is wide"""
QUIET_RANK = """%%torchrun --nproc-per-node 2 --as quiet --stall 60 --timeout 600
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    for line in LINES:
        print(line)
        time.sleep(0.05)
    while not os.path.exists("FILE"):
        time.sleep(0.1)
dist.all_reduce(torch.ones(1))
"""


def test_tables_scroll_and_a_silent_lane_says_what_its_rank_does(lab: Lab, page: Any, shots: Path) -> None:
    go, lines = lab.folder / "go", [*TABLE.splitlines(), *PROSE.splitlines()]
    lab.write("quiet.ipynb", ["%load_ext ddpkit", QUIET_RANK.replace("FILE", str(go)).replace("LINES", repr(lines))])
    lab.open(page, "quiet.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)
    wait_for_text(page, page.locator(".ddp-words"), "in all_reduce #1")
    wait_for_text(page, lane(page, 0), "longer than the lane")
    said = "log => getComputedStyle(log, '::before').content"
    assert lane(page, 1).evaluate(said) == '"no output yet: in all_reduce #1"'
    assert lane(page, 0).evaluate(said) == "none"
    heights = [row.bounding_box()["height"] for row in lane(page, 0).locator(".ddp-line").all()]
    rows = len(TABLE.splitlines())
    assert heights[:rows] == [18] * rows, "a row of a table is wrapped"
    assert len(heights) == len(lines) and min(heights[rows:]) > 18, "a line that is no table is not wrapped"
    assert lane(page, 0).evaluate("log => log.scrollWidth > log.clientWidth + 100")
    shoot_all(page, shots, "live-table")
    go.touch()
    wait_for_text(page, page.locator(".ddpkit"), "passed")
    page.wait_for_function(
        "() => document.querySelector('.ddp-lane:last-child .ddp-log').dataset.empty === 'no output'"
    )


def test_a_hung_job_keeps_its_verdict_diagnosis_and_table(lab: Lab, page: Any, shots: Path) -> None:
    cell = STALLS.replace("FILE", "never").replace("--timeout 600", "--stop-on-stall")
    lab.write("hangs.ipynb", ["%load_ext ddpkit", cell, "training.plot()", "training"])
    lab.open(page, "hangs.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)
    shown = page.locator(".ddpkit")
    wait_for_text(page, shown, "Rank 1 never joined all_reduce")
    wait_for_text(page, shown, "at fault")
    assert "skipped_collective · certain" in shown.inner_text()
    shown.locator(".ddp-diagnosis summary").click()
    wait_for_text(page, shown, "ddpkit explain skipped_collective")
    shown.locator(".ddp-row > summary").nth(1).click()
    shown.scroll_into_view_if_needed()
    shoot_all(page, shots, "live-hung")
    for cell_number in (2, 3):
        run_cell(page, cell_number)
    told = page.locator(".jp-RenderedHTML .ddpkit-run").filter(has_text="stacks, your own lines")
    told.last.wait_for()
    assert not told.first.is_visible(), "the live view above it has told the verdict already"
    page.locator(".jp-RenderedImage img").wait_for()
    page.locator(".jp-RenderedHTML").last.scroll_into_view_if_needed()
    page.screenshot(path=shots / "figure-hung.png")


def take_theme(page: Any, theme: str) -> None:
    """Switch JupyterLab's theme by its menu."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    for item in ("Theme", theme):
        page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{item}$")).click()
    page.wait_for_timeout(1_000)


def shoot_all(page: Any, shots: Path, name: str) -> None:
    """Screenshots in JupyterLab's light and dark themes, and 800 px wide."""
    shown = page.locator(".ddpkit").first
    for theme, suffix in (("JupyterLab Dark", "-dark"), ("JupyterLab Light", "")):
        take_theme(page, theme)
        page.locator(f".ddpkit[data-theme={theme.split()[1].lower()}]").first.wait_for()
        page.wait_for_timeout(1_000)
        page.screenshot(path=shots / f"{name}{suffix}.png")
        size = page.viewport_size
        page.set_viewport_size({"width": 800, "height": 1000})
        shown.scroll_into_view_if_needed()
        page.screenshot(path=shots / f"{name}{suffix}-800px.png")
        page.set_viewport_size(size)


def test_on_the_bench_a_decoy_fails_and_a_cure_passes(lab: Lab, page: Any, shots: Path) -> None:
    cells = [
        "import ddpkit\nbench = ddpkit.FixBench('unused_parameters')\nbench",
        "print(bench.results)",
        "bench.compare()",
    ]
    lab.write("bench.ipynb", cells)
    lab.open(page, "bench.ipynb")
    run_cell(page, 0)
    bench = page.locator(".ddpkit-bench")
    run, stop = (bench.get_by_role("button", name=name, exact=True) for name in ("Run", "Stop"))
    rows = bench.locator(".bench-results > table > tbody > tr")
    bench.get_by_text("self.middle = nn.Linear(32, 32)").first.wait_for()
    assert run.is_disabled() and bench.get_by_text("choose a prediction first").is_visible()
    assert "takes no part" not in bench.inner_text(), "the cause is told before a cure ran"
    choose(bench, "A barrier in every step")
    wait_for_text(page, bench.locator("tr.new"), "torch.distributed.barrier()")
    bench.get_by_role("button", name="cures").click()
    page.wait_for_function("() => document.querySelector('.ddpkit-bench button.mod-primary').disabled === false")
    # The keyboard does as well as the mouse.
    run.focus()
    page.keyboard.press("Enter")
    stop.wait_for()
    assert stop.count() == 1
    wait_for_text(page, rows, "fails")
    row = rows.first.inner_text()
    assert "A barrier in every step" in row and "cures" in row and "every rank raised RuntimeError, line 29" in row
    told = bench.get_by_role("status").filter(has_text="You said it cures; it fails: every rank raised")
    told.wait_for()
    verdict = bench.locator(".ddp-sentence").inner_text()
    assert verdict and bench.inner_text().count(verdict) == 1, "the verdict is told more than once"
    shoot_bench(page, bench, shots, "bench-decoy")
    assert run.is_disabled(), "the next run wants a prediction of its own"
    choose(bench, "A barrier in every step")
    choose(bench, "Freeze the layer before the wrap")
    wait_for_text(page, bench.locator("tr.new"), "net.middle.requires_grad_(False)")
    bench.get_by_role("button", name="cures").click()
    run.click()
    wait_for_text(page, rows.first, "✓ cures")
    wait_for_text(page, bench, "As you said, it cures: exit codes 0 0")
    wait_for_text(page, bench.locator(".bench-head"), "A layer takes no part in the loss, on every rank")
    # A row for each run, the newest first, and one below it with its evidence.
    assert rows.count() == 4 and not stop.is_visible()
    rows.nth(3).get_by_text("evidence").click()
    wait_for_text(page, rows.nth(3), "Expected to have finished reduction")
    shoot_bench(page, bench, shots, "bench-cure")
    for cell in (1, 2):
        run_cell(page, cell)
    wait_for_text(page, page.locator(".jp-OutputArea-output pre"), "Freeze the layer before the wrap")
    page.locator(".jp-RenderedImage img").wait_for()
    page.locator(".jp-RenderedImage img").scroll_into_view_if_needed()
    page.screenshot(path=shots / "bench-compared.png")


@pytest.mark.labs
@pytest.mark.parametrize("path", COURSE, ids=lambda p: p.stem)
def test_a_learner_meets_a_decoy_and_a_cure(lab: Lab, page: Any, shots: Path, path: Path) -> None:
    """A notebook's own bench, by hand: its broken program as it is, a remedy that does not hold, and one that does."""
    shutil.copy(path, lab.folder / path.name)
    lab.open(page, path.name)
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    sources = ["".join(c["source"]) for c in cells]
    made = next(i for i, text in enumerate(sources) if "FixBench(" in text)
    shown = next(i for i, text in enumerate(sources) if text.strip().splitlines()[-1] == "bench")
    reproduced = next(i for i, c in enumerate(cells) if "lab" in c["metadata"])
    revealed = [i for i, text in enumerate(sources) if ".reveal()" in text and i < made]
    name = cells[reproduced]["metadata"]["lab"]
    for cell in dict.fromkeys([0, reproduced, *revealed, made, shown]):
        run_cell(page, cell)
    bench = page.locator(".ddpkit-bench")
    bench.scroll_into_view_if_needed(timeout=PATIENCE_MS)
    rows = bench.locator(".bench-results > table > tbody > tr")
    already = rows.count()
    remedies = find_lab(name).remedies
    chosen = [None, next(r for r in remedies if r.kind == "decoy"), next(r for r in remedies if r.kind == "cure")]
    for i, (before, remedy) in enumerate(zip([None, *chosen], chosen, strict=False), 1):
        for one in (before, remedy):
            if one is not None:
                choose(bench, one.title)
        bench.get_by_role("button", name="fails").click()
        bench.get_by_role("button", name="Run", exact=True).click()
        # A row for the run, and one below it with its evidence; the newest comes first.
        rows.nth(already + 2 * i - 1).wait_for(timeout=PATIENCE_MS)
        bench.get_by_role("button", name="Run", exact=True).scroll_into_view_if_needed()
        page.screenshot(path=shots / f"{path.stem}-{i}-{remedy.name if remedy else 'as_it_is'}.png")
    verdicts = [rows.nth(2 * i).inner_text() for i in (2, 1, 0)]
    assert "✗" in verdicts[0] and "✗" in verdicts[1] and "✓ cures" in verdicts[2], verdicts
    assert all(r.title in verdict for r, verdict in zip(chosen, verdicts, strict=True) if r)
    rows.first.scroll_into_view_if_needed()
    page.screenshot(path=shots / f"{path.stem}-results.png")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[] if p is COURSE[-1] else pytest.mark.labs) for p in COURSE],
)
def test_a_reader_answers_before_the_verdict(lab: Lab, page: Any, shots: Path, path: Path) -> None:
    """The copy without outputs: nothing is revealed before an answer, and a wrong one is told beside the verdict."""
    (lab.folder / path.name).write_text(without_outputs(path.read_text()))
    lab.open(page, path.name)
    sources = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    reproduced = next(i for i, text in enumerate(sources) if text.startswith("%%torchrun"))
    asked = next(i for i, text in enumerate(sources) if "ddpkit.answer(" in text)
    revealed = next(i for i, text in enumerate(sources) if ".reveal()" in text)
    for cell in (0, reproduced, revealed):
        run_cell(page, cell)
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "Answer first: ddpkit.answer(run)")
    assert page.locator(".jp-OutputArea-output", has_text="You said").count() == 0
    run_cell(page, asked)
    box = page.locator(".ddpkit-answer")
    box.get_by_role("button", name="Answer").wait_for(timeout=PATIENCE_MS)
    assert box.get_by_role("button", name="Answer").is_disabled()
    page.screenshot(path=shots / f"{path.stem}-asked.png")
    choices = box.locator(".widget-toggle-buttons, .widget-radio, .widget-dropdown")
    for i in range(choices.count()):
        radio, menu = choices.nth(i).get_by_role("radio"), choices.nth(i).get_by_role("combobox")
        if radio.count():
            radio.last.check()
        elif menu.count():
            menu.select_option(index=1)
        else:
            choices.nth(i).get_by_role("button").last.click()
    box.get_by_role("button", name="Answer").click()
    wait_for_text(page, box, "reveal() shows it beside the verdict")
    run_cell(page, revealed)
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "You said")
    page.get_by_text("You said").last.scroll_into_view_if_needed()
    page.screenshot(path=shots / f"{path.stem}-answered.png")
    assert page.get_by_text(": it is ").count() >= 1


@pytest.mark.parametrize(
    ("program", "given", "at"),
    [
        ("hydra_like", "args=['model.spare=true']", "loss = nn.functional.mse_loss(self.model(x), y)"),
        pytest.param(
            *("accelerate_like", "env={'AUXILIARY': 'main'}", "loss = model(torch.randn(8, 8), auxiliary)"),
            marks=pytest.mark.labs,
        ),
    ],
)
def test_the_bench_of_a_readers_own_program(
    lab: Lab, page: Any, shots: Path, program: str, given: str, at: str
) -> None:
    """It opens at the fault, offers a remedy that fits, runs it with what the run was given, and verifies it."""
    shutil.copy(Path(__file__).parent / "programs" / f"{program}.py", lab.folder)
    launched = f"run = ddpkit.launch('{program}.py', {given}, show=False, timeout=120)"
    lab.write("own.ipynb", [f"import ddpkit\n{launched}\nbench = ddpkit.FixBench(run)\nbench"])
    lab.open(page, "own.ipynb")
    run_cell(page, 0)
    bench = page.locator(".ddpkit-bench")
    fault = bench.locator("tr.fault")
    wait_for_text(page, fault.first, at)
    wait_for_text(page, fault.last, "raised RuntimeError")
    pane, line = bench.locator(".bench-code").bounding_box(), fault.first.bounding_box()
    assert pane["y"] <= line["y"] <= pane["y"] + pane["height"] / 2, "the pane does not open at the fault"
    wait_for_text(page, bench.locator(".bench-head"), "as launched: 2 ranks")
    shoot_bench(page, bench, shots, f"bench-{program}")
    others = bench.get_by_text("more do not fit this script")
    others.click()
    wait_for_text(page, bench.locator("details.bench-muted[open]"), ": in the lab,")
    bench.screenshot(path=shots / f"bench-{program}-by-hand.png")
    others.click()
    choose(bench, "find_unused_parameters=True")
    wait_for_text(page, bench.locator("tr.new"), "find_unused_parameters=True")
    bench.get_by_role("button", name="cures").click()
    bench.get_by_role("button", name="Run", exact=True).click()
    wait_for_text(page, bench.locator(".bench-results > table > tbody > tr").first, "✓ cures")
    wait_for_text(page, bench, "As you said, it cures: exit codes 0 0, and the replicas are equal to each other")
    shoot_bench(page, bench, shots, f"bench-{program}-cured")


def choose(bench: Any, title: str) -> None:
    """Tick the box of a remedy."""
    bench.get_by_label(title, exact=True).click()


def shoot_bench(page: Any, bench: Any, shots: Path, name: str) -> None:
    """Screenshots of the bench in both themes, and 800 px wide, where nothing of it may be cut off."""
    for theme, suffix in (("JupyterLab Dark", "-dark"), ("JupyterLab Light", "")):
        take_theme(page, theme)
        bench.scroll_into_view_if_needed()
        bench.screenshot(path=shots / f"{name}{suffix}.png")
    size = page.viewport_size
    page.set_viewport_size({"width": 800, "height": 1000})
    page.wait_for_timeout(500)
    bench.screenshot(path=shots / f"{name}-800px.png")
    assert bench.evaluate(STICKS_OUT) == [], "the bench is wider than its cell at 800 px"
    page.set_viewport_size(size)


def test_a_flood_stays_live_and_says_what_it_skipped(lab: Lab, page: Any, shots: Path) -> None:
    (lab.folder / "flood.py").write_text("for i in range(100_000): print(f'{i:06d} '.ljust(79, 'x'))\n")
    lab.write("flood.ipynb", ["import ddpkit\nrun = ddpkit.launch('flood.py')\nprint('state:', run.state)"])
    lab.open(page, "flood.ipynb")
    run_cell(page, 0)
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "state: passed")
    for rank in (0, 1):
        wait_for_text(page, lane(page, rank), "099999 xxx")
        wait_for_text(page, lane(page, rank), "not shown here")
    assert page.locator(".ddp-line").count() < 5_000
    page.screenshot(path=shots / "live-flood.png")


def test_notebook_00_runs_and_its_lanes_fill_live(lab: Lab, page: Any, shots: Path) -> None:
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", lab.folder / "00_start_here.ipynb")
    lab.open(page, "00_start_here.ipynb")
    page.screenshot(path=shots / "notebook-00-stored.png")
    for _ in range(3):
        # JupyterLab drops what is run while its connection to the kernel settles; then it is pressed again.
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        with suppress(PlaywrightTimeout):
            page.locator(".ddpkit").first.wait_for(timeout=60_000)
            break
    first = page.locator(".ddpkit").first
    first.locator(".ddp-line").nth(1).wait_for()
    assert page.locator(".jp-InputPrompt", has_text="[*]").count() > 1, "nothing was live: every cell had ended"
    for rank in (0, 1):
        wait_for_text(page, first.get_by_role("log", name=re.compile(f"output of rank {rank}")), f"{rank}")
    first.scroll_into_view_if_needed()
    page.screenshot(path=shots / "notebook-00-first-job.png")
    page.wait_for_function(
        "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(p => p.textContent.includes('*'))",
        timeout=400_000,
    )
    assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
    page.screenshot(path=shots / "notebook-00-after.png")


def test_a_diagnosis_and_the_doctor_are_shown(lab: Lab, page: Any, shots: Path) -> None:
    log = ROOT / "tests" / "recorded" / "slurm" / "raise_torchrun.log"
    lab.write("logs.ipynb", [f'import ddpkit\nddpkit.diagnose("{log}")', "ddpkit.doctor()"])
    lab.open(page, "logs.ipynb")
    run_cell(page, 0)
    told = page.locator(".ddpkit-diagnosis")
    told.wait_for()
    assert "own_exception" in told.inner_text() and f"{log}:14, rank 1: KeyError: 4" in told.inner_text()
    run_cell(page, 1)
    wait_for_text(page, page.locator(".jp-OutputArea-output pre"), "would break a job")
    assert page.locator(".jp-OutputArea-output pre", has_text="/dev/shm").count() == 1
    page.screenshot(path=shots / "diagnose-and-doctor.png", full_page=True)
