"""Times the buckets of a DDP model on their way: when each was ready, and when it came back. `profiler.py` makes figures of it.

DDP takes one comm hook in its life and never lets go of it. So the hook stays with the model, averages exactly as DDP does
without one, and notes moments only while somebody watches.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

# Of so many backward passes the moments are kept; of a longer training the last ones.
KEPT_PASSES = 200
# Of more forward passes than this before one backward the waits for buffers are not added up.
MOST_SYNCS = 256

_taps: weakref.WeakKeyDictionary[Any, Tap] = weakref.WeakKeyDictionary()


class Clock(Protocol):
    """Takes moments without waiting for the device, and tells them apart afterwards."""

    def now(self) -> Any: ...
    def settle(self) -> None: ...
    def between_ms(self, start: Any, end: Any) -> float: ...


class HostClock:
    """Moments of this process: right where tensors are on the CPU, whose collectives come back when they are done."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Nothing is under way."""

    def between_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6


class GpuClock:
    """Moments of a GPU's streams, as CUDA events: the host runs ahead of them, and is not held up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        # In the callback of a future this is a stream that has waited for the collective.
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until all moments taken so far have come."""
        import torch

        torch.cuda.synchronize(self._device)

    def between_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end))


@dataclass(slots=True)
class Pass:
    """A backward pass that reduced gradients, with the forward passes before it, in moments of a clock.

    By bucket, in DDP's order: `ready` with its gradients, `back` with their average, `sizes` in bytes. `syncs`: from and
    to, where a forward pass waited for rank 0's buffers. `backward`: the gradient of the model's output was there.
    """

    syncs: list[tuple[Any, Any]] = field(default_factory=list)
    backward: Any = None
    ready: list[Any] = field(default_factory=list)
    back: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Watch:
    """What is noted while a model is watched: its passes, and the count and bytes of all of them."""

    def __init__(self, model: DistributedDataParallel, clock: Clock) -> None:
        self.clock = clock
        self.passes: deque[Pass] = deque(maxlen=KEPT_PASSES)
        self.count = self.bytes = 0
        self._pass = Pass()
        self._entered: Any = None
        self._model = model
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Follow the model's forward passes too; `end` takes these hooks away again."""
        self._hooks = [
            self._model.register_forward_pre_hook(self._before_forward),
            self._model.module.register_forward_pre_hook(self._before_model),
            self._model.register_forward_hook(self._after_forward),
        ]

    def end(self) -> None:
        """Follow no more."""
        for hook in self._hooks:
            hook.remove()

    def ready(self, bucket: Any, size: int) -> tuple[Pass, int]:
        """A bucket is ready; what is returned goes to `back`."""
        at = self._pass
        if bucket.index() == 0 and at.ready:
            # The last pass did not come to its end.
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
        """The bucket of that slot has come back; called by the backend's thread."""
        slot[0].back[slot[1]] = self.clock.now()

    def _before_forward(self, *_: Any) -> None:
        waits = self._model.will_sync_module_buffers() and len(self._pass.syncs) < MOST_SYNCS
        self._entered = self.clock.now() if waits else None

    def _before_model(self, *_: Any) -> None:
        if self._entered is not None:
            self._pass.syncs.append((self._entered, self.clock.now()))
            self._entered = None

    def _after_forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._pass.backward = None
        if (tensor := _differentiable(output)) is not None:
            tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _gradient: Any) -> None:
        if self._pass.backward is None:
            self._pass.backward = self.clock.now()


class Tap:
    """The comm hook of one model. It lives as long as the model, and is watched by at most one `Watch` at a time."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.watch: Watch | None = None
        self._model = weakref.ref(model)
        self._group = model.process_group
        self._size = self._group.size()

    def average(self, bucket: Any) -> Any:
        """A future of the bucket's average over the ranks, to the bit what DDP makes of it without a hook.

        Raises:
            RuntimeError: `Join` wants an average over the ranks that still have data, which a hook cannot know.
        """
        self._refuse_join()
        watch, tensor = self.watch, bucket.buffer()
        slot = watch.ready(bucket, _bytes(tensor)) if watch else None
        # DDP multiplies dense gradients by the reciprocal, and divides sparse ones.
        tensor.div_(self._size) if tensor.is_sparse else tensor.mul_(1.0 / self._size)
        future = self._group.allreduce([tensor]).get_future()
        if watch is None or slot is None:
            return future.then(_value)

        def back(done: Any) -> Any:
            watch.back(slot)
            return done.value()[0]

        return future.then(back)

    def _refuse_join(self) -> None:
        model = self._model()
        if model is not None and model._join_config.enable and not model._divide_by_initial_world_size:
            raise RuntimeError(
                "CommProfiler: Join(..., divide_by_initial_world_size=False) was asked of a model that has been profiled, "
                "and a profiled model averages over all ranks; leave that option at its default, or do not profile this job."
            )


def tap(model: DistributedDataParallel) -> Tap | str:
    """The tap of `model`, registered if it has none yet; or one sentence on why it can have none."""
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
    # By a power of two the same comes out either way.
    if size & (size - 1) and (model.gradient_as_bucket_view or getattr(model, "batched_grad_copy", False)):
        return (
            f"With gradients in the buckets DDP multiplies some by 1/{size} and divides others by {size}, which a hook cannot "
            "tell apart: the buckets are not timed."
        )
    return ""


def _hook(tap: Tap, bucket: Any) -> Any:
    return tap.average(bucket)


# DDP holds them against its own classes, and here they are strings.
_hook.__annotations__ = {}


def _value(done: Any) -> Any:
    return done.value()[0]


def _bytes(tensor: torch.Tensor) -> int:
    if tensor.is_sparse:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def _differentiable(output: Any) -> Any:
    """The first tensor in what a model returned that has a gradient; None where there is none."""
    if hasattr(output, "register_hook"):
        return output if output.requires_grad else None
    if is_dataclass(output) or isinstance(output, dict):
        output = list((output if isinstance(output, dict) else vars(output)).values())
    parts = output if isinstance(output, list | tuple) else ()
    return next((found for part in parts if (found := _differentiable(part)) is not None), None)
