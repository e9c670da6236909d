"""Notes when each bucket of a DDP model was ready, and when its average came back. `profiler.py` reports it.

DDP takes one comm hook and keeps it for good. So the hook stays with the model, averages exactly as DDP does without
one, and notes times only while a `CommProfiler` is open.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

# The times of the last so many backward passes are kept.
KEPT_PASSES = 200

_taps: weakref.WeakKeyDictionary[Any, Tap] = weakref.WeakKeyDictionary()


class HostClock:
    """This process's clock. It is right for the CPU, where a collective comes back when it is done."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Nothing to wait for."""

    def between_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6


class GpuClock:
    """CUDA events, so that the host does not wait for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        # In the callback of a future, the current stream has waited for the collective.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until all events so far have happened."""
        torch.cuda.synchronize(self._device)

    def between_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))


Clock = HostClock | GpuClock


@dataclass(slots=True)
class Pass:
    """The times of a backward pass that reduced gradients, and of the forward passes before it.

    Per bucket, in DDP's order: `ready` (its gradients are there), `back` (so is their average), `sizes` in bytes.
    `syncs`: begin and end of each wait for rank 0's buffers. `backward`: when it began.
    """

    syncs: list[tuple[Any, Any]] = field(default_factory=list)
    backward: Any = None
    ready: list[Any] = field(default_factory=list)
    back: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Watch:
    """The passes of a model while it is profiled, and the count and bytes of all of them."""

    def __init__(self, model: DistributedDataParallel, clock: Clock) -> None:
        self.clock = clock
        self.passes: deque[Pass] = deque(maxlen=KEPT_PASSES)
        self.count = self.bytes = 0
        self._pass = Pass()
        self._entered: Any = None
        self._model = model
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Add the hooks on the model's forward passes; `end` removes them."""
        self._hooks = [
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.module.register_forward_pre_hook(self._before_model),
            self._model.register_forward_hook(self._after_forward),
        ]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def ready(self, bucket: Any, size: int) -> tuple[Pass, int]:
        """Note that a bucket is ready; pass the result to `back`."""
        at = self._pass
        if bucket.index() == 0 and at.ready:
            # The pass before was not finished.
            at = self._pass = Pass()
        at.ready.append(self.clock.now())
        at.back.append(None)
        at.sizes.append(size)
        self.bytes += size
        if bucket.is_last():
            self.count += 1
            self.passes.append(at)
            self._pass = Pass()
        return at, len(at.ready) - 1

    def back(self, slot: tuple[Pass, int]) -> None:
        """Note that this bucket's average is there; called by the backend's thread."""
        slot[0].back[slot[1]] = self.clock.now()

    def _before_forward(self, *_: Any) -> None:
        self._entered = self.clock.now() if self._model.will_sync_module_buffers() else None

    def _before_model(self, *_: Any) -> None:
        if self._entered is not None:
            self._pass.syncs.append((self._entered, self.clock.now()))
            self._entered = None

    def _after_forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._pass.backward = None
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)
                return

    def _backward_begins(self, _gradient: Any) -> None:
        if self._pass.backward is None:
            self._pass.backward = self.clock.now()


class Tap:
    """The comm hook of one model, for as long as the model lives. At most one `Watch` at a time reads it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.watch: Watch | None = None
        self._model = weakref.ref(model)
        self._group = model.process_group
        self._size = self._group.size()

    def average(self, bucket: Any) -> Any:
        """A future of the bucket's average over the ranks, bit for bit what DDP computes without a hook."""
        self._refuse_join()
        watch, tensor = self.watch, bucket.buffer()
        slot = watch.ready(bucket, _bytes(tensor)) if watch else None
        # As DDP does: dense gradients times the reciprocal, sparse ones divided.
        tensor.div_(self._size) if tensor.is_sparse else tensor.mul_(1.0 / self._size)

        def back(done: Any) -> Any:
            if watch is not None and slot is not None:
                watch.back(slot)
            return done.value()[0]

        return self._group.allreduce([tensor]).get_future().then(back)

    def _refuse_join(self) -> None:
        """`Join` may ask for an average over the ranks that still have data; a hook cannot know those."""
        model = self._model()
        if model is not None and model._join_config.enable and not model._divide_by_initial_world_size:
            raise RuntimeError(
                "CommProfiler: Join(..., divide_by_initial_world_size=False) was asked of a model that has been profiled, "
                "and a profiled model averages over all ranks; leave that option at its default, or do not profile this job."
            )


def tap(model: DistributedDataParallel) -> Tap | str:
    """The tap of `model`, registered if it has none yet; or a sentence on why it cannot have one."""
    if model in _taps:
        return _taps[model]
    if why := _untapped(model):
        return why
    made = _taps[model] = Tap(model)
    model.register_comm_hook(made, _hook)
    return made


def _untapped(model: DistributedDataParallel) -> str:
    hook = model._get_ddp_logging_data().get("comm_hook")
    if hook or model._comm_hooks:
        return f"The model has a comm hook already ({hook or 'unnamed'}), and DDP takes one: the buckets are not timed."
    if getattr(model, "_use_python_reducer", False):
        return "The model reduces gradient by gradient, with DDP's reducer for compiled models: there are no buckets to time."
    size = model.process_group.size()
    # For a power of two, multiplying and dividing give the same.
    if size & (size - 1) and (model.gradient_as_bucket_view or getattr(model, "batched_grad_copy", False)):
        return (
            f"With gradients in the buckets DDP multiplies some by 1/{size} and divides others by {size}, which a hook cannot "
            "tell apart: the buckets are not timed."
        )
    return ""


def _hook(tap: Tap, bucket: Any) -> Any:
    return tap.average(bucket)


# DDP compares the annotations with its own classes; here they are strings.
_hook.__annotations__ = {}


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
