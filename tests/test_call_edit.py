"""Edits of one call in programs as people write them: each is found under its names, and everything else stays."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from ddpkit.course.call_edit import CallEdit, edited
from ddpkit.errors import LaunchError

PROGRAM = """
from __future__ import annotations
import torch.nn as nn
import torch.nn.parallel as par
from torch.nn.parallel import DistributedDataParallel as DDP
é = "ü"; a = DDP(é, device_ids=(1))  # ünchanged
b = par.DistributedDataParallel(
    (net),  # not DDP(net)
    # more to come
)
c = nn.parallel.DistributedDataParallel(net, find_unused_parameters=False,)
def go(DistributedDataParallel):
    opt.zero_grad(); loss.backward(); opt.step(); scheduler.step()
    if warm: opt.step()
    DistributedDataParallel(net)
    a.module(
        x)
    opt.step()  # the second in this block
"""
OWN_GROUP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group()
ddp = DistributedDataParallel(net)
def train():
    for x in batches:
        loss(
            ddp(x),
        ).backward()"""


@pytest.mark.parametrize(
    ("program", "edit", "taken", "put"),
    [
        (
            PROGRAM,
            {"call": "DistributedDataParallel", "set": "find_unused_parameters=True"},
            [
                'é = "ü"; a = DDP(é, device_ids=(1))  # ünchanged',
                "c = nn.parallel.DistributedDataParallel(net, find_unused_parameters=False,)",
            ],
            [
                'é = "ü"; a = DDP(é, device_ids=(1), find_unused_parameters=True)  # ünchanged',
                "    find_unused_parameters=True,",
                "c = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True,)",
            ],
        ),
        (
            PROGRAM,
            {"call": "nn.parallel.DistributedDataParallel", "drop": ["device_ids", "broadcast_buffers"]},
            ['é = "ü"; a = DDP(é, device_ids=(1))  # ünchanged'],
            ['é = "ü"; a = DDP(é)  # ünchanged'],
        ),
        (
            PROGRAM,
            {"call": ".step", "after": "torch.distributed.barrier()", "needs": "import torch"},
            ["    opt.zero_grad(); loss.backward(); opt.step(); scheduler.step()", "    if warm: opt.step()"],
            [
                "import torch",
                "    opt.zero_grad(); loss.backward(); opt.step(); torch.distributed.barrier(); scheduler.step()",
                "    if warm: opt.step(); torch.distributed.barrier()",
            ],
        ),
        (PROGRAM, {"call": ".module", "function": "{owner}"}, ["    a.module("], ["    a("]),
        (
            OWN_GROUP,
            {
                "call": "init_process_group",
                "set": "timeout=timedelta(seconds=60)",
                "needs": "from datetime import timedelta",
            },
            ["dist.init_process_group()"],
            ["from datetime import timedelta", "dist.init_process_group(timeout=timedelta(seconds=60))"],
        ),
        (
            OWN_GROUP,
            {"call": ".backward", "within": "with {ddp}.no_sync():"},
            ["        loss(", "            ddp(x),", "        ).backward()"],
            [
                "        with ddp.no_sync():",
                "            loss(",
                "                ddp(x),",
                "            ).backward()",
            ],
        ),
        (
            OWN_GROUP,
            {"call": ".backward", "before": "dist.barrier()", "needs": "import torch.distributed as dist"},
            [],
            ["        dist.barrier()"],
        ),
        (OWN_GROUP, {"call": ".backward", "after": "dist.barrier()"}, [], ["        dist.barrier()"]),
    ],
)
def test_a_call_is_edited_and_nothing_else(
    program: str, edit: dict[str, Any], taken: list[str], put: list[str]
) -> None:
    new = edited(program, CallEdit(**edit))
    lines = list(difflib.ndiff(program.splitlines(), new.splitlines()))
    assert [line[2:] for line in lines if line.startswith("- ")] == taken
    assert [line[2:] for line in lines if line.startswith("+ ")] == put
    compile(new, "program", "exec")


@pytest.mark.parametrize(
    ("edit", "by_hand"),
    [
        ({"call": "DataLoader", "set": "drop_last=True"}, "put drop_last=True into the call of DataLoader"),
        ({"call": "DataLoader", "drop": ["num_workers"]}, "take num_workers out of the call of DataLoader"),
        ({"call": ".set_epoch", "after": "dist.barrier()"}, r"put dist.barrier\(\) after the call of .set_epoch"),
        ({"call": ".module", "function": "{owner}"}, "call the DDP model itself in place of .module"),
        ({"call": ".backward", "within": "with {ddp}.no_sync():"}, r"put with ddp.no_sync\(\): around"),
    ],
)
def test_what_does_not_fit_says_what_to_do_by_hand(edit: dict[str, Any], by_hand: str) -> None:
    """Also a DDP model of another function: its name is not known where the backward is."""
    program = OWN_GROUP.replace("ddp = Dist", "def wrap():\n    ddp = Dist")
    with pytest.raises(LaunchError, match=f"an edit does not fit: {by_hand}"):
        edited(program, CallEdit(**edit))
    with pytest.raises(LaunchError, match="an edit does not fit"):
        edited("a program that does not compile", CallEdit(**edit))
