"""`memory_budget`: a true limit on the tensors of this rank, and a record of what fills it, step by step.

The notebook's side, `display/memory_plot.py`, draws the record. On the CPU the limit is RLIMIT_DATA, which counts what a
process may write to and shares with nobody; on a GPU it is the caching allocator's own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing.util
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpkit.recorder import failure
from ddpkit.runfolder import wire

from .limits import MIB, CpuMemory, GpuMemory, Memory

if TYPE_CHECKING:
    import torch

# Beyond this many steps only every so-many-th is written down.
ALL_STEPS, EVERY = 1000, 100

_budget: Budget | None = None
_armed = False


def memory_budget(mib: float | None, device: torch.device | None = None) -> Budget:
    """Let the tensors of this rank take `mib` MiB (of 2**20 bytes) in all, from here on; those that exist already count.

    What Python and torch themselves need does not count, so that a budget means the same on every machine. A later
    allocation that does not fit fails as it would on a full machine: on the CPU with `RuntimeError: ...
    DefaultCPUAllocator: can't allocate memory`, on a GPU with `torch.OutOfMemoryError`. The place to call it is right
    after `setup()`, before there is a model: DDP's buckets, which only C++ can see, are then counted too.

    Args:
        mib: the budget; None limits nothing, and still records what fills the memory. A later call replaces an earlier one.
        device: the CPU or a GPU; by default this rank's GPU where the backend is NCCL, otherwise the CPU.

    On the CPU three things are not as on a larger machine: a thread that starts later takes its stack from the budget
    (8 MiB as a rule); memory that is shared with DataLoader workers is not counted; a program started by `subprocess`
    inherits the limit. Processes made by `multiprocessing`, and so DataLoader workers, are not limited.

    Raises:
        ValueError: the budget is not above what this rank's tensors hold already, or above what the GPU has.
        RuntimeError: this system cannot hold a process to a limit; on the CPU that takes Linux.
    """
    global _budget
    where = _device(device)
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
    import torch

    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or "bad_alloc" in str(error))
    )


class Budget:
    """A budget in force, with what is used of it. All figures are MiB of this rank's tensors; `mib` is None for no limit."""

    def __init__(self, mib: float | None, memory: Memory) -> None:
        self.mib = mib
        self._memory = memory
        self._peak_mib = 0.0
        self._parts: dict[str, float] = {}
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self._first: weakref.ref[Any] | None = None
        self._steps = 0

    def used_mib(self) -> float:
        """What the tensors take now."""
        return self._memory.used_mib()

    def peak_mib(self) -> float:
        """The most that they took at once since the budget was set."""
        self._peak_mib = max(self._peak_mib, self._memory.peak_mib())
        return self._peak_mib

    def parts_mib(self) -> dict[str, float]:
        """What is known of it: parameters, gradients, optimizer state, DDP's buckets. Activations are in the rest."""
        self._look_around()
        return self._known()

    def lift(self) -> None:
        """Let this process take what it likes again."""
        self._memory.lift()

    def release(self, pid: int) -> None:
        """Lift the limit in a child of this process, which has inherited it."""
        self._memory.release(pid)

    def before_step(self, optimizer: Any) -> None:
        """The hook that torch calls before an optimizer's step: the gradients are complete."""
        if optimizer not in self._optimizers:
            self._first = self._first or weakref.ref(optimizer)
            self._optimizers.add(optimizer)
            self._look_around()
            self._parts = self._known()

    def after_step(self, optimizer: Any) -> None:
        """The hook that torch calls after it. Where there are several optimizers, one inside another too, the first counts."""
        if self._first is None or optimizer is not self._first():
            return
        self._parts = self._known()
        if self._steps < ALL_STEPS or self._steps % EVERY == 0:
            self.write("step", step=self._steps)
        self._steps += 1

    def at_exit(self) -> None:
        """What filled the memory at the end, which for a rank that ran out is the moment to know about."""
        found = self.parts_mib()
        self._parts = {part: max(size, self._parts.get(part, 0.0)) for part, size in found.items()}
        self.write("end")

    def write(self, what: str, **more: int) -> None:
        """A line of the record."""
        folder = failure.own_folder()
        if folder is None:
            return
        line = {"at_ns": time.time_ns(), "what": what, "budget_mib": self.mib, "used_mib": self.used_mib()}
        _append(folder / wire.MEMORY, {**line, **more, "peak_mib": self.peak_mib(), "parts_mib": self._parts})

    def _look_around(self) -> None:
        """Find the modules that there are now."""
        import torch

        self._modules.update(o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module))

    def _known(self) -> dict[str, float]:
        import torch

        seen: set[int] = set()
        with torch.no_grad():
            own = [*_own(self._modules), *(p for o in self._optimizers for g in o.param_groups for p in g["params"])]
            gradients = [p.grad for p in own if p.grad is not None]
            state = [t for o in self._optimizers for t in _tensors(dict(o.state))]
            sizes = (_bytes(own, seen), _bytes(gradients, seen), _bytes(state, seen), _bucket_bytes(self._modules))
        return {part: size / MIB for part, size in zip(wire.MEMORY_PARTS, sizes, strict=True)}


def _arm() -> None:
    """Follow every optimizer's steps, and let go of processes that come out of this one; once."""
    global _armed
    if _armed:
        return
    _armed = True
    from torch.optim import optimizer

    optimizer.register_optimizer_step_pre_hook(_before_step)
    optimizer.register_optimizer_step_post_hook(_after_step)
    atexit.register(_at_exit, os.getpid())
    os.register_at_fork(after_in_child=_lift)
    starting: Any = multiprocessing.util
    starting.spawnv_passfds = _releasing(starting.spawnv_passfds)


def _before_step(optimizer: Any, *_: Any) -> None:
    if _budget is not None:
        _budget.before_step(optimizer)


def _after_step(optimizer: Any, *_: Any) -> None:
    if _budget is not None:
        _budget.after_step(optimizer)


def _lift() -> None:
    if _budget is not None:
        _budget.lift()


def _releasing(start: Callable[..., int]) -> Callable[..., int]:
    """`start`, which starts a process for multiprocessing and returns its pid, with the limit lifted in that process."""

    def spawnv_passfds(*arguments: Any) -> int:
        pid = start(*arguments)
        if _budget is not None:
            _budget.release(pid)
        return pid

    return spawnv_passfds


def _at_exit(pid: int) -> None:
    if _budget is not None and os.getpid() == pid:
        _budget.lift()
        _budget.at_exit()


def _device(device: torch.device | None) -> torch.device:
    import torch
    import torch.distributed as dist

    if device is not None:
        return torch.device(device)
    on_gpu = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _append(path: Path, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# What is in the memory.


def _own(modules: Iterable[Any]) -> Iterator[Any]:
    """The parameters and buffers of `modules` themselves."""
    for module in modules:
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _tensors(nest: Any) -> Iterator[Any]:
    """The tensors in nested dicts and lists, such as an optimizer's state."""
    import torch

    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, dict | list | tuple):
        for each in nest.values() if isinstance(nest, dict) else nest:
            yield from _tensors(each)


def _bytes(tensors: Iterable[Any], seen: set[int]) -> int:
    """Bytes of `tensors` on this rank, each piece of memory once: those at the addresses in `seen` are counted already."""
    total = 0
    for tensor in tensors:
        part = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor
        # A tensor without values, or without memory, has no address.
        if (address := part.data_ptr()) and address not in seen:
            seen.add(address)
            total += part.numel() * part.element_size()
    return total


def _bucket_bytes(modules: Iterable[Any]) -> int:
    """DDP's buckets: a copy of every gradient, unless the gradients lie in them."""
    from torch.nn.parallel import DistributedDataParallel

    return sum(
        p.numel() * p.element_size()
        for module in modules
        if isinstance(module, DistributedDataParallel) and not module.gradient_as_bucket_view
        for p in module.parameters()
        if p.requires_grad
    )
