"""A job on Slurm's hosts in JupyterLab: its queue, its lanes, Stop, a host that dies, and a kernel that comes back to it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, machines
from test_browser import Lab, browser, lab, lane, page, run_cell, shoot_all, shots, wait_for_text

__all__ = ["browser", "lab", "machines", "page", "shots"]
pytestmark = [pytest.mark.labs, pytest.mark.timeout(600), pytest.mark.xdist_group("browser")]
TRAIN = """
import ddpkit
def train():
    import time, torch.distributed as dist
    from ddpkit.rank import setup
    with setup() as here:
        for step in range(10_000):
            print(f"rank {here.rank} at step {step}", flush=True)
            dist.barrier()
            time.sleep(0.2)
"""
LAUNCH = (
    "run = ddpkit.launch(train, slurm=ddpkit.SlurmOptions(nodes=2{more}), nproc=2{rest})\nprint('state:', run.state)"
)


@pytest.fixture(scope="module")
def server(machines: Cluster, tmp_path_factory: pytest.TempPathFactory, shots: Path) -> Iterator[Lab]:
    started = Lab(tmp_path_factory.mktemp("lab"), shots)
    yield started
    started.close()


@pytest.fixture
def queue(machines: Cluster, lab: Lab) -> Iterator[Cluster]:
    """The cluster; afterwards no job and no process of one is left on any host."""
    yield machines
    machines.wait_until_empty()


def launch(lab: Lab, page: Any, name: str, *cells: str) -> None:
    lab.write(f"{name}.ipynb", list(cells))
    lab.open(page, f"{name}.ipynb")
    run_cell(page, 0)
    run_cell(page, 1)


def until_at_work(page: Any) -> None:
    for rank in range(4):
        wait_for_text(page, lane(page, rank), f"rank {rank} at step 10")


def test_a_job_waits_in_the_queue_then_runs_on_its_hosts_and_is_stopped(
    queue: Cluster, lab: Lab, page: Any, shots: Path
) -> None:
    launch(lab, page, "queue", TRAIN, LAUNCH.format(more=", sbatch=['--hold']", rest=""), "run")
    shown = page.locator(".ddpkit")
    wait_for_text(page, shown, "waits in the queue (JobHeldUser: its user holds it)")
    assert shown.locator(".ddp-pill").inner_text() == "in the queue"
    shoot_all(page, shots, "slurm-queue")
    queue.said("scontrol", "release", queue.queue().split()[0])
    until_at_work(page)
    assert "in the queue" not in shown.inner_text()
    titles = " ".join(shown.locator(".ddp-lane-head").all_inner_texts())
    assert all(len(re.findall(rf"rank \d on {host}", titles)) == 2 for host in ("n1", "n2")), titles
    shoot_all(page, shots, "slurm-live")
    before = time.monotonic()
    page.get_by_role("button", name="Stop").click()
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "state: stopped")
    assert time.monotonic() - before < 15
    run_cell(page, 2)
    shoot_all(page, shots, "slurm-stopped")


def test_stop_while_the_job_waits_in_the_queue(queue: Cluster, lab: Lab, page: Any, shots: Path) -> None:
    launch(lab, page, "held", TRAIN, LAUNCH.format(more=", sbatch=['--hold']", rest=""))
    wait_for_text(page, page.locator(".ddpkit"), "waits in the queue")
    page.get_by_role("button", name="Stop").click()
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "state: stopped")
    wait_for_text(page, page.locator(".ddpkit"), "did not start")
    page.screenshot(path=shots / "slurm-stopped-in-queue.png")


def test_a_standstill_names_hosts(queue: Cluster, lab: Lab, page: Any, shots: Path) -> None:
    leaves = TRAIN.replace("dist.barrier()", "time.sleep(1000) if here.rank == 1 and step == 3 else dist.barrier()")
    launch(lab, page, "stalls", leaves, LAUNCH.format(more="", rest=", stall=3"))
    rows = page.locator(".ddpkit .ddp-row")
    wait_for_text(page, rows, "holds up the rest")
    assert all(re.match(r"rank \d on n[12]\s", text.strip()) for text in rows.all_inner_texts()), rows.all_inner_texts()
    name, state = (rows.nth(1).locator(f".ddp-cells > {each}").bounding_box() for each in ("b", ".ddp-state-cell"))
    assert name["x"] + name["width"] <= state["x"], "a rank's name and its state overlap"
    shoot_all(page, shots, "slurm-standstill")
    page.get_by_role("button", name="Stop").click()
    wait_for_text(page, page.locator(".jp-OutputArea-output"), "state: stopped")


def test_a_host_that_dies_is_told_in_the_page(queue: Cluster, lab: Lab, page: Any, shots: Path) -> None:
    launch(lab, page, "dies", TRAIN, LAUNCH.format(more="", rest=""), "run")
    until_at_work(page)
    shown = page.locator(".ddpkit")
    died = time.monotonic()
    queue.kill_node("n2")
    try:
        wait_for_text(page, shown, "No sign of life from n2")
        assert time.monotonic() - died < 10
        assert shown.locator(".ddp-lane-head").filter(has_text="on n2").filter(has_text="no sign of life").count() == 2
        page.screenshot(path=shots / "slurm-host-died-note.png")
        wait_for_text(page, shown, "Host n2 is gone, and its agent left no record")
        assert "at fault" not in shown.inner_text(), "a rank is not at fault that goes with its host"
        run_cell(page, 2)
        shown.get_by_text("Where each rank was").click()
        shoot_all(page, shots, "slurm-host-died")
    finally:
        queue.start_node("n2")


def test_a_kernel_that_restarts_shows_its_job_again(queue: Cluster, lab: Lab, page: Any, shots: Path) -> None:
    again = "import ddpkit, glob\nrun = ddpkit.Run.attach(glob.glob('.ddpkit/runs/*')[0])"
    launch(lab, page, "again", TRAIN, LAUNCH.format(more="", rest=", wait=False"), again, "run.stop()")
    until_at_work(page)
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    wait_for_text(page, page.locator(".ddpkit"), "no word from the kernel")
    page.screenshot(path=shots / "slurm-kernel-restarted.png")
    run_cell(page, 2)
    shown = page.locator(".ddpkit").last
    wait_for_text(page, shown.get_by_role("log", name="output of rank 3"), "rank 3 at step")
    times = shown.locator(".ddp-line[data-t]").evaluate_all(
        "lines => lines.map(line => line.dataset.t.replace('≤', ''))"
    )
    assert min(map(float, times)) > 5, "time does not count from the submission"
    shown.scroll_into_view_if_needed()
    shoot_all(page, shots, "slurm-attached")
    run_cell(page, 3)
    wait_for_text(page, shown, "stopped")
