"""`memory_budget`: a real limit on the tensors of this rank, and a record of what fills it, step by step.

`display/memory_plot.py` draws the record. On the CPU the limit is RLIMIT_DATA, which counts the memory that a process may
write to and does not share; on a GPU it is the caching allocator's own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer

from ddpkit.recorder import failure
from ddpkit.runfolder import wire

from .contents import Contents
from .limits import CpuMemory, GpuMemory

# The first so many steps are written down; after them only every so-many-th.
ALL_STEPS, EVERY = 1000, 100

_budget: Budget | None = None
_armed = False


def memory_budget(mib: float | None) -> Budget:
    """Limit the tensors of this rank to `mib` MiB (of 2**20 bytes) from here on; those that exist already count.

    Those on its GPU if the backend is NCCL, otherwise those on the CPU.

    What Python and torch themselves need does not count, so a budget means the same on every machine. An allocation that
    does not fit fails as on a full machine: on the CPU with `RuntimeError: ... DefaultCPUAllocator: can't allocate memory`,
    on a GPU with `torch.OutOfMemoryError`. Call it right after `setup()`, before there is a model: DDP's buckets, which
    only C++ can see, are then counted too.

    Args:
        mib: the budget; None sets no limit, and still records what fills the memory. A later call replaces an earlier one.

    On the CPU three things differ from a larger machine: a thread that starts later takes its stack from the budget (8 MiB
    as a rule); memory that is shared with DataLoader workers is not counted; a program started by `subprocess` inherits the
    limit. Processes made by `multiprocessing`, and so DataLoader workers, are not limited.

    Raises:
        ValueError: this rank's tensors already hold more than the budget, or the GPU has less.
        RuntimeError: this system cannot limit a process; on the CPU that needs Linux.
    """
    global _budget
    where = default_device()
    memory = GpuMemory(where) if where.type == "cuda" else CpuMemory()
    held_mib = memory.held_mib
    if mib is not None and mib <= held_mib:
        raise ValueError(
            f"memory_budget: {mib:g} MiB asked for, but this rank's tensors hold {held_mib:.0f} MiB already; "
            "ask for more, or call it before the model is built."
        )
    if _budget is not None:
        _budget.lift()
    if mib is not None:
        memory.limit(mib)
    _budget = Budget(mib, memory)
    _arm()
    _budget.write("budget")
    return _budget


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, on a GPU or the CPU. The CPU's text does not hold the words "out of memory"."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or "bad_alloc" in str(error))
    )


class Budget:
    """A budget in force, and what is used of it: MiB of this rank's tensors. `mib` is None for no limit."""

    def __init__(self, mib: float | None, memory: CpuMemory | GpuMemory) -> None:
        self.mib, self.memory = mib, memory
        self._peak_mib = 0.0
        self._contents = Contents()
        self._parts: dict[str, float] = {}
        self._first: weakref.ref[Any] | None = None
        self._steps = 0

    def used_mib(self) -> float:
        """What the tensors take now."""
        return self.memory.used_mib()

    def peak_mib(self) -> float:
        """The most that the tensors have taken at once under this budget."""
        self._peak_mib = max(self._peak_mib, self.memory.peak_mib())
        return self._peak_mib

    def parts_mib(self) -> dict[str, float]:
        """The known parts: parameters, gradients, optimizer state, DDP's buckets. Activations are in the rest."""
        self._contents.look_around()
        return self._contents.parts_mib()

    def lift(self) -> None:
        """Remove the limit."""
        self.memory.lift()

    def before_step(self, optimizer: Any) -> None:
        """torch calls this before an optimizer's step, when the gradients are complete."""
        if self._first is None or optimizer not in self._contents.optimizers:
            self._first = self._first or weakref.ref(optimizer)
            self._parts = self.parts_mib()

    def after_step(self, optimizer: Any) -> None:
        """torch calls this after it. Of several optimizers, one inside another too, only the first counts."""
        if self._first is None or optimizer is not self._first():
            return
        self._parts = self._contents.parts_mib()
        if self._steps < ALL_STEPS or self._steps % EVERY == 0:
            self.write("step", step=self._steps)
        self._steps += 1

    def at_exit(self) -> None:
        """Record what filled the memory at the end: if the rank ran out, that is what to know."""
        for part, size in self.parts_mib().items():
            self._parts[part] = max(size, self._parts.get(part, 0.0))
        self.write("end")

    def write(self, what: str, **more: int) -> None:
        """A line of the record."""
        folder = failure.own_folder()
        if folder is None:
            return
        line = {"at_ns": time.time_ns(), "what": what, "budget_mib": self.mib, **more}
        sizes = {"used_mib": self.used_mib(), "peak_mib": self.peak_mib(), "parts_mib": self._parts}
        with contextlib.suppress(OSError), open(folder / wire.MEMORY, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **sizes}) + "\n")


def in_force() -> Budget | None:
    """The budget that was asked for last."""
    return _budget


def default_device() -> torch.device:
    """This rank's GPU if the backend is NCCL, otherwise the CPU."""
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _arm() -> None:
    """Follow every optimizer's steps, and lift the limit in processes that this one starts; once."""
    global _armed
    if _armed:
        return
    _armed = True
    torch_optimizer.register_optimizer_step_pre_hook(lambda optimizer, *_: _present().before_step(optimizer))
    torch_optimizer.register_optimizer_step_post_hook(lambda optimizer, *_: _present().after_step(optimizer))
    atexit.register(_at_exit, os.getpid())
    os.register_at_fork(after_in_child=lambda: _present().lift())
    starting: Any = multiprocessing.util
    starting.spawnv_passfds = _releasing(starting.spawnv_passfds)


def _present() -> Budget:
    assert _budget is not None
    return _budget


def _releasing(start: Callable[..., int]) -> Callable[..., int]:
    """`start`, which starts a process for multiprocessing and returns its pid, with the limit lifted in that process."""

    def spawnv_passfds(*arguments: Any) -> int:
        pid = start(*arguments)
        _present().memory.release(pid)
        return pid

    return spawnv_passfds


def _at_exit(pid: int) -> None:
    if os.getpid() == pid:
        _present().lift()
        _present().at_exit()
