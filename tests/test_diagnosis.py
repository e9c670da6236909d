"""Diagnoses of recorded ranks: each page is found by real lines and by no others, victims are never the cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_records import GAVE_UP, PEER_LOST, write_rank, write_run

from ddpkit import Run
from ddpkit.diagnosis.pages import pages
from ddpkit.diagnosis.run import Diagnosis, diagnose
from ddpkit.runfolder import wire
from ddpkit.runfolder.ranks import Rank, read_attempts
from ddpkit.runfolder.stable import stable
from ddpkit.verdict.finding import Culprit, Verdict


@dataclass(frozen=True)
class Said:
    """What one rank left behind: the exception as (type, message), what it was raised from, stderr, or torchrun's log."""

    type: str = ""
    message: str = ""
    chain: tuple[tuple[str, str], ...] = ()
    stderr: str = ""
    torchrun: str = ""
    signal: str = ""


def raised(kind: str, message: str = "", *chain: tuple[str, str], stderr: str = "") -> Said:
    return Said(kind, message, chain, stderr)


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
EOF_IN_LOAD = (
    'Traceback (most recent call last):\n  File "/site-packages/torch/serialization.py", line 1, in load\nEOFError\n'
)
EXITED = "DataLoader worker (pid(s) 19882) exited unexpectedly"
CUDA_KERNEL = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API "
    "call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1."
)
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a total capacity of 23.65 GiB of which 11.06 MiB is free. "
    "Including non-PyTorch memory, this process has 23.60 GiB memory in use."
)
NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for details)"
USAGE = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
PREAMBLE = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    f"  what():  [enforce fail at {GLOO[1:]}pair.cc:456] op.preamble.length <= op.nbytes. 1000 vs 4. Received data size "
    "doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
)
UNUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your "
    "module has parameters that were not used in producing loss. You can enable unused parameter detection by passing the "
    "keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by \n"
    "making sure all `forward` function outputs participate in calculating loss. \n"
    "Parameter indices which did not receive grad for rank 1: 2 3"
)
CHANGED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your "
    "training graph has changed in this iteration, e.g., one parameter is used in first iteration, but then got unused in "
    "the second iteration. this is not compatible with static_graph set to True."
)
TWICE = (
    "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module "
    "parameter outside the `forward` function.\nParameter at index 3 with name b.bias has been marked as ready twice. This "
    "means that multiple autograd engine  hooks have fired for this particular parameter during this iteration."
)
DETAIL = (
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=1, "
    "OpType=ALLREDUCE, TensorShape=[4]), but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=1, "
    "OpType=BROADCAST).Collectives differ in the following aspects: \t Op type: ALLREDUCEvs BROADCAST"
)
GUARD = (
    "RuntimeError: \n        An attempt has been made to start a new process before the\n"
    "        current process has finished its bootstrapping phase.\n"
)
SPAWN = (
    "/site-packages/torch/utils/data/dataloader.py:438: UserWarning: Got pickle error when attempting to start a worker "
    "Process. This might be because the worker Process arguments are not picklable.\n"
)
OLD_SPAWN = (
    '[rank1]:   File "/site-packages/torch/utils/data/dataloader.py", line 388, in _get_iterator\n'
    "[rank1]:     return _MultiProcessingDataLoaderIter(self)\n"
    "[rank1]: AttributeError: Can't pickle local object 'DS.__init__.<locals>.<lambda>'\n"
)
WEIGHTS = (
    "Weights only load failed. This file can still be loaded, to do so you have two options, do those steps only if you "
    "trust the source of the checkpoint.\n\tWeightsUnpickler error: Unsupported global: GLOBAL argparse.Namespace was not an "
    "allowed global by default."
)
SHM = "unable to allocate shared memory(shm) for file </torch_24126_3100670051_0>: No space left on device (28)"
FSIZE = "unable to resize file </torch_22307_1913227233_0> to the right size: File too large (27)"
WORKER = "Caught {0} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n{0}: {1}\n"
KEYS = (
    'Error(s) in loading state_dict for Sequential:\n\tMissing key(s) in state_dict: "0.weight", "0.bias". \n\t'
    'Unexpected key(s) in state_dict: "module.0.weight", "module.0.bias". '
)
IN_USE = (
    "The server socket has failed to listen on any local network address. port: 29871, useIpv6: false, code: -98, "
    "name: EADDRINUSE, message: address already in use"
)
FS = (
    "DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory."
)
READING = (
    '[rank1]:   File "/venv/torch/utils/data/dataloader.py", line 1291, in _try_get_data\n'
    "[rank1]:     data = self._data_queue.get(timeout=timeout)\n"
    '[rank1]:   File "/usr/lib/python3.11/multiprocessing/connection.py", line 399, in _recv\n'
    "[rank1]:     raise EOFError\n[rank1]: EOFError\n"
)
RESET = READING.replace("raise EOFError", "chunk = read(handle, remaining)").replace(
    "EOFError", "ConnectionResetError: [Errno 104] Connection reset by peer"
)
GONE = RESET.replace(
    "ConnectionResetError: [Errno 104] Connection reset by peer", "FileNotFoundError: [Errno 2] No such file"
)
OUT_OF_FILES = (
    READING.replace("line 399, in _recv", "line 538, in rebuild_storage_fd")
    + "OSError: [Errno 24] Too many open files: '/tmp/pymp-8a6usplp'\n"
)
AT_REST = "DataLoader worker (pid 20683) exited unexpectedly with exit code 3. Details are lost due to multiprocessing."
LISTENING = "The client socket has timed out after 5000ms while trying to connect to (localhost, 1)."

# Lines from real jobs, from torch's source, or (CUDA and NCCL) from public reports; by the page that they must lead to.
REAL = [
    ("unused_parameters", raised("RuntimeError", UNUSED)),
    ("graph_changed", raised("RuntimeError", CHANGED)),
    ("marked_ready_twice", raised("RuntimeError", TWICE)),
    ("marked_ready_twice", raised("RuntimeError", TWICE.partition("\n")[2])),
    (
        "inplace_modification",
        raised(
            "RuntimeError",
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            "[torch.FloatTensor [2]], which is output 0 of Exp, is at version 1; expected version 0 instead.",
        ),
    ),
    (
        "inplace_modification",
        raised("RuntimeError", "a leaf Variable that requires grad is being used in an in-place operation."),
    ),
    ("skipped_collective", raised("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms")),
    ("skipped_collective", raised("RuntimeError", "Rank 1 failed to pass monitoredBarrier in 3000 ms")),
    ("collective_mismatch", Said(stderr=PREAMBLE, signal="SIGABRT")),
    ("collective_mismatch", raised("RuntimeError", DETAIL)),
    ("collective_mismatch", raised("RuntimeError", "Received data size doesn't match expected size.")),
    ("collective_mismatch", raised("RuntimeError", "Is there a distributed collective mismatch in your code?")),
    ("uneven_inputs", raised("RuntimeError", "Rank 1 exhausted all inputs.")),
    (
        "uneven_inputs",
        raised("RuntimeError", "Detected at least one rank that exhausted inputs. Throwing across all ranks."),
    ),
    (
        "loader_worker_killed",
        raised(
            "RuntimeError", EXITED, ("RuntimeError", "DataLoader worker (pid 19882) is killed by signal: Aborted. ")
        ),
    ),
    ("loader_worker_killed", raised("RuntimeError", EXITED, ("RuntimeError", AT_REST))),
    (
        "loader_worker_killed",
        raised(
            "ConnectionResetError",
            "[Errno 104] Connection reset by peer",
            stderr="ERROR: Unexpected segmentation fault encountered in worker.\n",
        ),
    ),
    ("loader_worker_killed", raised("ConnectionResetError", "[Errno 104] Connection reset by peer", stderr=RESET)),
    ("loader_worker_killed", raised("FileNotFoundError", "[Errno 2] No such file or directory", stderr=GONE)),
    ("too_many_open_files", raised("EOFError", stderr=OUT_OF_FILES)),
    ("loader_worker_exception", raised("ValueError", WORKER.format("ValueError", "bad record 20"))),
    ("loader_worker_exception", raised("KeyError", WORKER.format("KeyError", "'bad record 2'"))),
    ("loader_timeout", raised("RuntimeError", "DataLoader timed out after 3.0 seconds")),
    (
        "loader_unpicklable",
        raised("AttributeError", "Can't pickle local object 'DS.__init__.<locals>.<lambda>'", stderr=SPAWN),
    ),
    ("loader_unpicklable", raised("AttributeError", "Can't pickle local object 'D.<lambda>'", stderr=OLD_SPAWN)),
    ("loader_shared_memory", raised("RuntimeError", WORKER.format("RuntimeError", SHM))),
    ("loader_shared_memory", raised("RuntimeError", WORKER.format("RuntimeError", FSIZE))),
    ("loader_shared_memory", raised("RuntimeError", "Couldn't allocate shared memory segment: x")),
    ("bus_error", raised("RuntimeError", EXITED, ("RuntimeError", FS))),
    (
        "bus_error",
        raised(
            "ConnectionResetError",
            "[Errno 104] Connection reset by peer",
            stderr="ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory "
            "(shm).\n",
        ),
    ),
    ("loader_main_guard", raised("RuntimeError", EXITED, stderr=GUARD)),
    ("too_many_open_files", raised("RuntimeError", "received 0 items of ancdata")),
    ("too_many_open_files", raised("OSError", "[Errno 24] Too many open files")),
    ("missing_rank_at_init", raised("DistStoreError", "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1")),
    (
        "missing_rank_at_init",
        raised("DistStoreError", "Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
    ),
    (
        "missing_rank_at_init",
        raised("RuntimeError", "Timed out initializing process group in store based barrier on rank: 0, for key: k"),
    ),
    ("missing_rank_at_init", Said(torchrun="torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n")),
    ("wrong_address", raised("DistNetworkError", LISTENING)),
    (
        "wrong_address",
        raised("DistNetworkError", "The client socket cannot be initialized: Name or service not known"),
    ),
    ("unhandled_signal", Said(signal="SIGUSR1")),
    (
        "wrong_address",
        Said(
            stderr="[E1121 10:22:18.663564097 TCPStore.cpp:328] [c10d] TCP client failed to connect/validate to host "
            "localhost:29990 - timed out (try=1, timeout=3000ms)\n"
        ),
    ),
    (
        "wrong_address",
        Said(
            torchrun="torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store "
            "has failed. See inner exception for details.\n"
        ),
    ),
    ("address_in_use", raised("DistNetworkError", IN_USE)),
    ("address_in_use", Said(torchrun=f"torch.distributed.DistNetworkError: {IN_USE}\n")),
    (
        "network_interface",
        raised(
            "RuntimeError", f"[enforce fail at {GLOO[1:]}device.cc:84] ifa != nullptr. Unable to find address for: eth9"
        ),
    ),
    (
        "network_interface",
        raised(
            "DistBackendError",
            "ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
        ),
    ),
    ("network_interface", raised("RuntimeError", f"Gloo connectFullMesh failed with {GLOO}pair.cc:144] no error")),
    (
        "network_interface",
        raised("RuntimeError", "GlooDeviceFactory::makeTCPDevice(): interface or hostname can't be empty"),
    ),
    (
        "process_group_missing",
        raised(
            "ValueError", "Default process group has not been initialized, please make sure to call init_process_group."
        ),
    ),
    (
        "not_under_torchrun",
        raised(
            "ValueError",
            "Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
        ),
    ),
    ("not_under_torchrun", raised("KeyError", "'LOCAL_RANK'")),
    ("torchrun_arguments", Said(torchrun="ValueError: Unsupported nproc_per_node value: two\n")),
    ("torchrun_arguments", Said(torchrun="torchrun: error: unrecognized arguments: --foo\n")),
    ("backend_not_built_in", raised("RuntimeError", "Distributed package doesn't have NCCL built in")),
    ("invalid_device", raised("ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!")),
    ("nccl_invalid_usage", raised("DistBackendError", f"{NCCL}\n{USAGE}")),
    ("nccl_error", raised("RuntimeError", "NCCL Error 7: unknown")),
    (
        "nccl_system_error",
        raised("RuntimeError", "NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    ),
    (
        "duplicate_gpu",
        raised("DistBackendError", f"{NCCL}\n{USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"),
    ),
    (
        "invalid_device",
        raised("RuntimeError", CUDA_KERNEL.replace("device-side assert triggered", "invalid device ordinal")),
    ),
    ("invalid_device", raised("AssertionError", "Torch not compiled with CUDA enabled")),
    ("invalid_device", raised("AttributeError", "module 'torch._C' has no attribute '_cuda_setDevice'")),
    ("invalid_device", raised("RuntimeError", "No CUDA GPUs are available")),
    ("invalid_device", raised("RuntimeError", "Attempting to deserialize object on a CUDA device but torch.cuda")),
    ("invalid_device", Said(torchrun="ValueError: Cuda is not available.\n")),
    (
        "cuda_in_fork",
        raised(
            "RuntimeError",
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' "
            "start method",
        ),
    ),
    ("device_side_assert", raised("RuntimeError", CUDA_KERNEL)),
    (
        "cuda_kernel_error",
        raised(
            "RuntimeError",
            CUDA_KERNEL.replace("device-side assert triggered", "an illegal memory access was encountered"),
        ),
    ),
    (
        "no_kernel_image",
        raised("RuntimeError", "CUDA error: no kernel image is available for execution on the device"),
    ),
    (
        "out_of_memory_cpu",
        raised(
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "8388608 bytes. Error code 12 (Cannot allocate memory)",
        ),
    ),
    ("out_of_memory_cpu", raised("MemoryError")),
    ("out_of_memory_cpu", raised("OSError", "[Errno 12] Cannot allocate memory")),
    ("out_of_memory_cpu", raised("ImportError", "libtorch_cpu.so: failed to map segment from shared object")),
    (
        "out_of_memory_cpu",
        Said(stderr="OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\n"),
    ),
    ("out_of_memory_cuda", raised("OutOfMemoryError", CUDA_OOM)),
    (
        "out_of_memory_cuda",
        raised("RuntimeError", CUDA_KERNEL.replace("device-side assert triggered", "out of memory")),
    ),
    (
        "shapes_differ_between_ranks",
        raised(
            "RuntimeError",
            "[1]: params[0] in this process with sizes [5, 8] appears not to match sizes of the same param in process 0.",
        ),
    ),
    (
        "shapes_differ_between_ranks",
        raised(
            "RuntimeError",
            "DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 4 params.",
        ),
    ),
    (
        "tensors_on_different_devices",
        raised(
            "RuntimeError",
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        ),
    ),
    (
        "tensors_on_different_devices",
        raised("RuntimeError", "Tensor on device meta is not on the expected device cpu!"),
    ),
    (
        "tensors_on_different_devices",
        raised(
            "RuntimeError", "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"
        ),
    ),
    ("tensors_on_different_devices", raised("RuntimeError", "No backend type associated with device type cpu")),
    ("checkpoint_keys", raised("RuntimeError", KEYS)),
    ("checkpoint_keys", raised("RuntimeError", KEYS.partition("\n")[2])),
    ("checkpoint_keys", raised("RuntimeError", "Missing key in checkpoint state_dict: ema.weight.")),
    ("checkpoint_keys", raised("ValueError", "loaded state dict has a different number of parameter groups")),
    (
        "checkpoint_keys",
        raised(
            "ValueError",
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        ),
    ),
    (
        "half_written_checkpoint",
        raised("RuntimeError", "PytorchStreamReader failed reading zip archive: failed finding central directory."),
    ),
    ("half_written_checkpoint", raised("EOFError", stderr=EOF_IN_LOAD)),
    (
        "own_exception",
        raised("EOFError", stderr=EOF_IN_LOAD.replace("torch/serialization", "multiprocessing/connection")),
    ),
    ("half_written_checkpoint", raised("EOFError", "Ran out of input")),
    (
        "half_written_checkpoint",
        raised("RuntimeError", "unexpected EOF, expected 237 more bytes. The file might be corrupted."),
    ),
    ("weights_only", raised("UnpicklingError", WEIGHTS)),
    ("weights_only", raised("UnpicklingError", WEIGHTS.partition("\n")[2])),
    ("import_error", raised("ModuleNotFoundError", "No module named 'src'")),
    (
        "import_error",
        raised("ImportError", "cannot import name 'nosuch' from 'torch' (/site-packages/torch/__init__.py)"),
    ),
    ("syntax_error", raised("SyntaxError", "invalid syntax (a.py, line 1)")),
    (
        "syntax_error",
        raised("IndentationError", "expected an indented block after 'if' statement on line 1 (a.py, line 2)"),
    ),
    ("not_a_script", Said(stderr="python3: can't open file '/tmp/nofile.py': [Errno 2] No such file or directory\n")),
    ("not_a_script", Said(stderr="python3: can't find '__main__' module in '/tmp/cat'\n")),
    (
        "not_a_script",
        Said(
            stderr="python3: Error while finding module specification for 'nomod.sub' (ModuleNotFoundError: No module named "
            "'nomod')\n"
        ),
    ),
    (
        "not_a_script",
        Said(stderr="python3: No module named a.__main__; 'a' is a package and cannot be directly executed\n"),
    ),
    (
        "local_rank_argument",
        raised(
            "SystemExit", "exit code 2", stderr="usage: lr.py\nlr.py: error: unrecognized arguments: --local-rank=0\n"
        ),
    ),
    (
        "local_rank_argument",
        raised("SystemExit", "exit code 2", stderr="t.py: error: the following arguments are required: --local_rank\n"),
    ),
    ("exit_code", raised("SystemExit", "no data under /data", stderr="no data under /data\n")),
    ("exit_code", Said()),
    ("nan_loss", raised("RuntimeError", "Function 'MulBackward0' returned nan values in its 0th output.")),
    (
        "nan_loss",
        raised(
            "RuntimeError",
            "The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be clipped.",
        ),
    ),
    ("nan_loss", raised("ValueError", "loss is nan at step 3")),
    ("nan_loss", raised("FloatingPointError", "non-finite loss")),
    ("own_exception", raised("ValueError", "boom at step 3")),
    ("own_exception", raised("AssertionError")),
    (
        "notebook_keyboard",
        raised("EOFError", "rank 0 asked for keyboard input, but the ranks of a job have no keyboard."),
    ),
    ("notebook_keyboard", raised("EOFError", "EOF when reading a line")),
    ("notebook_keyboard", raised("BdbQuit")),
    ("cannot_pickle", raised("TypeError", "cannot pickle '_thread.lock' object")),
    ("cannot_pickle", raised("AttributeError", "Can't pickle local object 'loc.<locals>.inner'")),
    ("ended_from_outside", raised("KeyboardInterrupt")),
    (
        "ended_from_outside",
        Said(torchrun="torch.distributed.elastic.multiprocessing.api.SignalException: Process 25435 got signal: 15\n"),
    ),
    ("killed", Said(signal="SIGKILL")),
    ("segmentation_fault", Said(signal="SIGSEGV")),
    ("segmentation_fault", Said(signal="SIGFPE")),
    ("segmentation_fault", Said(signal="SIGILL")),
    ("bus_error", Said(signal="SIGBUS")),
    ("aborted", Said(signal="SIGABRT")),
    ("unhandled_signal", Said(signal="SIGTERM")),
    ("unhandled_signal", Said(signal="SIGINT")),
    ("unhandled_signal", Said(signal="SIGHUP")),
    ("unhandled_signal", Said(signal="SIGRTMIN+1")),
]

# What a victim says; by the page that a verdict without a culprit leads to.
VICTIMS = [
    ("peer_lost", PEER_LOST.format(port=2958)),
    (
        "peer_lost",
        f"{GLOO}pair.cc:537] Read error [127.0.0.1]:28845: Connection reset by peer. This is typically caused by",
    ),
    ("peer_lost", f"{GLOO}pair.cc:1] Broken pipe"),
    ("peer_lost", "Application timeout caused pair closure"),
    ("gave_up", "Operation timed out!"),
    (
        "peer_lost",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
    ("peer_lost", "Connection was likely closed. Did the remote server shutdown or crash?"),
    ("gave_up", GAVE_UP),
    (
        "gave_up",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, "
        "NumelIn=544997376, NumelOut=68124672, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.",
    ),
    (
        "gave_up",
        "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
    ),
]


def write_said(folder: Path, rank: int, said: Said, **ended: Any) -> None:
    """Write down a rank that said so and failed of it."""
    failure = None
    if said.type:
        chain = [{"type": kind, "message": message} for kind, message in said.chain]
        failure = {"type": said.type, "message": said.message, "chain": chain}
    if said.signal:
        ended = {"exitcode": -6, "signal": said.signal, **ended}
    write_rank(folder, rank, failure, **ended)
    log = folder / "logs" / "none_x" / "attempt_0" / str(rank) / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(said.stderr)


def read(folder: Path) -> tuple[Rank, ...]:
    attempts = read_attempts(folder)
    return attempts[-1] if attempts else ()


def verdict(
    culprit: Culprit, kind: str, sentence: str = "Rank 1 is at fault.", certain: bool = True, **roles: str
) -> Verdict:
    """A verdict in which the ranks without a role were hurt, or are all at fault."""
    numbered = dict.fromkeys(range(64), "culprit" if culprit == "every rank" else "consequence")
    numbered |= {int(name.removeprefix("r")): role for name, role in roles.items()}
    numbered |= {culprit: "culprit"} if isinstance(culprit, int) else {}
    return Verdict(culprit=culprit, sentence=sentence, kind=kind, certain=certain, roles=numbered)


def diagnosed(folder: Path, said: Said) -> Diagnosis:
    """The diagnosis of a job whose rank 1 said so, and whose rank 0 lost it."""
    write_run(folder)
    if said.torchrun:
        found = diagnose((), verdict(None, "agent_failed"), said.torchrun)
    else:
        write_said(folder, 0, raised("RuntimeError", PEER_LOST.format(port=1)))
        write_said(folder, 1, said)
        found = diagnose(read(folder), verdict(1, "own", r0="consequence", r1="culprit"))
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "said"), REAL)
def test_a_real_line_leads_to_its_page(tmp_path: Path, name: str, said: Said) -> None:
    found = diagnosed(tmp_path, said)
    assert (found.name, found.rank) == (name, None if said.torchrun else 1), str(found)
    assert found.confidence in ("certain", "likely") and found.collect == ""
    evidence = found.evidence[0]
    if not said.torchrun:
        assert evidence.rank == 1
        assert evidence.text in (tmp_path / evidence.file).read_text() or said.message
        assert [c.rank for c in found.consequences] == [0]
        assert "Connection closed by peer" in found.consequences[0].text


@pytest.mark.parametrize(("name", "said"), REAL)
def test_no_other_page_lays_claim_to_it(name: str, said: Said) -> None:
    """Beyond who wins: no specific signature of another page fits these lines at all."""
    texts = [
        f"{said.type}: {said.message}",
        *(f"{kind}: {text}" for kind, text in said.chain),
        said.stderr,
        said.torchrun,
    ]
    for page in pages():
        for signature in page.signatures:
            specific = signature.text and not signature.general and not signature.consequence
            if page.name != name and specific and signature.type in ("", said.type):
                assert not any(signature.pattern.search(text) for text in texts), f"{page.name}: {signature.text}"


# The rank at fault, and the ranks that are not.


def test_a_job_that_passed_has_no_diagnosis(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, Said(stderr="CUDA out of memory, trying half the batch\n"), exitcode=0)
    write_said(tmp_path, 1, Said(), exitcode=0)
    assert diagnose(read(tmp_path), verdict(None, "passed", "", r0="passed", r1="passed")) is None


@pytest.mark.parametrize(("kind", "text"), VICTIMS)
def test_a_victims_words_are_never_the_cause(tmp_path: Path, kind: str, text: str) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, raised("RuntimeError", text))
    write_said(tmp_path, 1, Said(), exitcode=-15, signal="SIGTERM", told="SIGTERM", told_ns=1)
    found = diagnose(
        read(tmp_path), verdict(None, kind, "The rank at fault cannot be told.", r0="consequence", r1="consequence")
    )
    assert found is not None
    assert found.name == {"peer_lost": "peer_lost", "gave_up": "collective_timeout"}[kind]
    assert (found.rank, found.confidence, found.evidence) == (None, "likely", ())
    assert [c.rank for c in found.consequences] == [0] and found.consequences[0].text.endswith(text)
    assert "stall=5" in found.collect


@pytest.mark.parametrize(("_", "text"), VICTIMS)
def test_a_victims_words_in_the_culprits_own_mouth_are_not_the_cause(tmp_path: Path, _: str, text: str) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, raised("RuntimeError", text))
    found = diagnose(read(tmp_path), verdict(0, "never_joined", r0="culprit"))
    assert found is not None and found.name == "skipped_collective"


def test_a_victim_aborted_by_a_lost_peer_is_no_abort_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, Said(stderr=f"terminate called\n  what(): {PEER_LOST.format(port=3)}\n", signal="SIGABRT"))
    found = diagnose(read(tmp_path), verdict(None, "peer_lost", r0="consequence"))
    assert found is not None and found.name == "peer_lost"
    assert found.consequences[0].line == 2 and found.consequences[0].file.endswith("stderr.log")


def test_only_the_culprit_is_asked(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, raised("OutOfMemoryError", CUDA_OOM))
    write_said(tmp_path, 1, raised("ValueError", "boom"))
    found = diagnose(read(tmp_path), verdict(1, "own", r0="own", r1="culprit"))
    assert found is not None and (found.name, found.consequences) == ("own_exception", ())


def test_every_rank_alike_is_one_diagnosis_with_a_line_of_each(tmp_path: Path) -> None:
    write_run(tmp_path)
    for rank in (0, 1):
        write_said(tmp_path, rank, raised("RuntimeError", UNUSED))
    found = diagnose(read(tmp_path), verdict("every rank", "own", r0="culprit", r1="culprit"))
    assert found is not None and (found.name, found.rank, found.confidence) == (
        "unused_parameters",
        "every rank",
        "certain",
    )
    assert [e.rank for e in found.evidence] == [0, 1]


def test_in_a_tie_the_one_that_a_page_knows_speaks(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, raised("KeyError", "'x'"))
    write_said(tmp_path, 1, raised("RuntimeError", "DataLoader timed out after 3.0 seconds"))
    found = diagnose(read(tmp_path), verdict(None, "tie", r0="own", r1="own"))
    assert found is not None and (found.name, found.rank, found.confidence) == ("loader_timeout", None, "likely")


def test_a_wrong_address_explains_the_rank_that_waited_for_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, raised("DistStoreError", "wait timeout after 5000ms, keys: /default_pg/0//cpu//0/1"))
    write_said(tmp_path, 1, raised("DistNetworkError", LISTENING))
    found = diagnose(read(tmp_path), verdict(None, "gave_up", r0="consequence", r1="consequence"))
    assert found is not None and found.name == "wrong_address"
    assert found.evidence[0].rank == 1 and found.consequences[0].rank == 0


@pytest.mark.parametrize(
    ("kind", "culprit", "name", "confidence"),
    [
        ("left_early", 1, "early_exit", "certain"),
        ("never_joined", 1, "skipped_collective", "certain"),
        ("unmatched", 1, "unmatched_send_recv", "certain"),
        ("no_key", 1, "store_key_never_set", "certain"),
        ("mismatch", None, "collective_mismatch", "likely"),
        ("stopped_process", 1, "stopped_process", "certain"),
        ("loader_stuck", 1, "loader_worker_stuck", "certain"),
        ("loader_dead", 1, "loader_worker_killed", "certain"),
        ("init_waiting", 1, "missing_rank_at_init", "certain"),
        ("all_waiting", None, "everyone_waits", "likely"),
        ("busy", 1, "long_computation", "certain"),
        ("straggler", 1, "straggler", "certain"),
        ("init_elsewhere", 1, "wrong_address", "certain"),
        ("stale_addresses", None, "restart_meets_old_addresses", "likely"),
        ("shapes_differ", 0, "shapes_differ_between_ranks", "certain"),
        ("silent", 1, "silent_wait", "certain"),
        ("spawned", 1, "spawn_under_torchrun", "certain"),
        ("agent_killed", None, "agent_killed", "certain"),
        ("ended", None, "ended_from_outside", "certain"),
        ("timed_out", None, "time_limit", "certain"),
    ],
)
def test_a_verdict_alone_leads_to_its_page(
    tmp_path: Path, kind: str, culprit: Culprit, name: str, confidence: str
) -> None:
    write_run(tmp_path)
    for rank in (0, 1):
        write_said(tmp_path, rank, Said(), exitcode=-15, signal="SIGTERM", told="SIGTERM", told_ns=1)
    found = diagnose(read(tmp_path), verdict(culprit, kind, r0="consequence"))
    assert found is not None
    assert (found.name, found.rank, found.confidence) == (name, culprit, confidence)


def test_of_a_verdict_that_compared_ranks_it_is_only_likely(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 1, Said(), exitcode=-15, signal="SIGTERM", told="SIGTERM", told_ns=1)
    for kind in ("never_joined", "mismatch", "unmatched", "no_key"):
        compared = diagnose(read(tmp_path), verdict(1, kind, certain=False))
        seen = diagnose(read(tmp_path), verdict(1, kind))
        assert compared and seen and (compared.confidence, seen.confidence) == ("likely", "certain"), kind


def test_where_nothing_fits_it_is_unknown_and_says_what_to_collect(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, Said(), exitcode=None)
    found = diagnose(read(tmp_path), verdict(None, "unknown", "How they ended is not recorded.", r0="unknown"))
    assert found is not None
    assert (found.name, found.confidence, found.evidence) == ("unknown", "unknown", ())
    assert "run.ranks[i].stderr" in found.collect
    assert str(found).startswith("unknown: No failure of the catalog fits")
    agent = diagnose((), verdict(None, "agent_failed"), "AttributeError: something new\n")
    assert agent is not None and "run.torchrun_log" in agent.collect
    odd = tmp_path / "odd"
    write_run(odd)
    write_said(odd, 1, Said(signal="signal 33"))
    killed = diagnose(read(odd), verdict(1, "own", r1="culprit"))
    assert killed is not None and killed.name == "unknown"


def test_of_an_nccl_job_the_flight_recorder_is_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, Said(stderr=VICTIMS[-2][1] + "\n", signal="SIGABRT"))
    found = diagnose(read(tmp_path), verdict(None, "gave_up", r0="consequence"))
    assert found is not None and "TORCH_FR_BUFFER_SIZE" in found.collect


# Which signature wins: text and type, text, text that only says where, signal, verdict, the user's own exception.


def test_text_with_its_type_wins_over_text(tmp_path: Path) -> None:
    nobody_there = ("DistNetworkError", "Name or service not known")
    found = diagnosed(tmp_path, raised("RuntimeError", "DataLoader timed out after 3 seconds", nobody_there))
    assert found.name == "wrong_address"


@pytest.mark.parametrize(
    "said",
    [
        raised("RuntimeError", "DataLoader worker (pid 19882) is killed by signal: Killed. ", ("EOFError", "")),
        raised("RuntimeError", EXITED, ("EOFError", "")),
        raised("EOFError", "", stderr=READING),
    ],
)
def test_a_read_cut_short_yields_to_the_death_of_the_worker_that_wrote(tmp_path: Path, said: Said) -> None:
    assert diagnosed(tmp_path, said).name == "loader_worker_killed"


def test_text_wins_over_a_general_one_however_far_behind(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, raised("RuntimeError", EXITED, ("OSError", "[Errno 24] Too many open files")))
    assert found.name == "too_many_open_files"


def test_the_nearer_of_two_texts_wins(tmp_path: Path) -> None:
    chain = ("RuntimeError", "DataLoader timed out after 3 seconds")
    assert diagnosed(tmp_path, raised("RuntimeError", SHM, chain)).name == "loader_shared_memory"


def test_text_wins_over_a_signal(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, Said(stderr=PREAMBLE, signal="SIGABRT")).name == "collective_mismatch"


@pytest.mark.parametrize("signal", ["SIGABRT", "SIGSEGV"])
def test_a_rank_that_gloo_ends_for_a_mismatch_is_not_thereby_at_fault(tmp_path: Path, signal: str) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 0, raised("RuntimeError", PEER_LOST.format(port=1)))
    write_said(tmp_path, 1, Said(stderr=PREAMBLE, signal=signal))
    assert Run.from_folder(tmp_path).culprit is None


def test_a_signal_wins_over_the_verdict(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 1, Said(signal="SIGSEGV"))
    found = diagnose(read(tmp_path), verdict(1, "never_joined", r1="culprit"))
    assert found is not None and found.name == "segmentation_fault"


def test_the_verdict_wins_over_an_exception_nobody_knows(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 1, raised("ValueError", "boom"))
    found = diagnose(read(tmp_path), verdict(1, "left_early", r1="culprit"))
    assert found is not None and found.name == "early_exit"


# What is on stderr beside an exception.


def test_an_error_that_was_printed_and_dealt_with_is_not_the_cause(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, raised("ValueError", "boom", stderr="RuntimeError: CUDA out of memory. Retrying.\n"))
    assert found.name == "own_exception"


def test_nor_is_it_for_a_rank_that_was_killed(tmp_path: Path) -> None:
    assert diagnosed(tmp_path, Said(stderr="DataLoader timed out after 3 seconds\n", signal="SIGKILL")).name == "killed"


def test_nor_for_a_job_that_somebody_ended(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(
        tmp_path, 0, Said(stderr="RuntimeError: CUDA out of memory\n"), exitcode=-15, signal="SIGTERM", told="SIGTERM"
    )
    found = diagnose(read(tmp_path), verdict(None, "ended", "The job was stopped.", r0="consequence"))
    assert found is not None and found.name == "ended_from_outside"


def test_a_program_that_leaves_by_an_exit_code_is_explained_by_its_last_words(tmp_path: Path) -> None:
    found = diagnosed(
        tmp_path, raised("SystemExit", "exit code 1", stderr="torch.OutOfMemoryError: " + CUDA_OOM + "\n")
    )
    assert (found.name, found.confidence) == ("out_of_memory_cuda", "likely")


def test_warnings_of_a_healthy_start_are_nothing(tmp_path: Path) -> None:
    harmless = (
        "[W1121 10:22:18.6 socket.cpp:200] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 97 - "
        "Address family not supported by protocol).\n"
        "[W1121 10:22:18.6 ProcessGroupGloo.cpp:1] destroy_process_group() was not called before program exit\n"
        "UserWarning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters\n"
        "FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated.\n"
        "NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n"
    )
    assert diagnosed(tmp_path, Said(stderr=harmless)).name == "exit_code"


# The evidence.


def test_evidence_is_the_line_in_the_log_that_a_reader_can_open(tmp_path: Path) -> None:
    log = "step 0\nTraceback (most recent call last):\n[rank1]: RuntimeError: DataLoader timed out after 3 seconds\n"
    found = diagnosed(tmp_path, raised("RuntimeError", "DataLoader timed out after 3 seconds", stderr=log))
    (evidence,) = found.evidence
    assert (evidence.file, evidence.line) == ("logs/none_x/attempt_0/1/stderr.log", 3)
    assert evidence.text == "RuntimeError: DataLoader timed out after 3 seconds"
    assert found.confidence == "certain"


def test_without_a_log_it_is_the_record(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, raised("RuntimeError", "DataLoader timed out after 3 seconds"))
    assert (found.evidence[0].file, found.evidence[0].line) == ("ranks/attempt_0/rank_1/failure.json", 1)


def test_of_a_signal_it_is_the_exit_record(tmp_path: Path) -> None:
    (evidence,) = diagnosed(tmp_path, Said(signal="SIGKILL")).evidence
    assert evidence.file == "ranks/attempt_0/rank_1/exit.json"
    assert evidence.text in (tmp_path / evidence.file).read_text()


def test_the_line_number_counts_from_the_start_of_a_long_log(tmp_path: Path) -> None:
    log = "x" * 99 + "\n"
    said = Said(stderr=log * 20_000 + "RuntimeError: DataLoader timed out after 3 seconds\n")
    (evidence,) = diagnosed(tmp_path, said).evidence
    assert evidence.line == 20_001


def test_of_a_verdict_it_is_the_line_of_the_stack(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_said(tmp_path, 1, Said(), exitcode=-15, signal="SIGTERM", told="SIGTERM", told_ns=1)
    stack = 'Current thread 0x00007f (most recent call first):\n  File "/home/me/train.py", line 23 in load_batch\n'
    (wire.rank_folder(tmp_path, 0, 1) / wire.STACK).write_text(stack)
    found = diagnose(read(tmp_path), verdict(1, "never_joined", r1="culprit"))
    assert found is not None
    (evidence,) = found.evidence
    assert (evidence.file, evidence.line) == ("ranks/attempt_0/rank_1/stack.txt", 2)
    assert evidence.text == 'File "/home/me/train.py", line 23 in load_batch'


def test_text_and_html_hold_nothing_that_varies(tmp_path: Path) -> None:
    texts = set()
    for pid, port in ((19882, 1), (3, 41669)):
        folder = tmp_path / str(pid)
        write_run(folder)
        write_said(folder, 0, raised("RuntimeError", PEER_LOST.format(port=port)))
        message = f"DataLoader worker (pid {pid}) is killed by signal: Killed. "
        log = "one line more\n" * pid + f"RuntimeError: {message}\n"
        write_said(folder, 1, raised("RuntimeError", message, stderr=log))
        (folder / "logs" / "none_x").rename(folder / "logs" / f"none_{pid}")
        found = diagnose(read(folder), verdict(1, "own", "Rank 1 raised.", r0="consequence", r1="culprit"))
        assert found is not None
        texts.add((str(found), repr(found), found._repr_html_()))
    ((text, _, html),) = texts
    assert text.splitlines()[0] == "loader_worker_killed (certain): A DataLoader worker died"
    assert (
        "evidence     rank 1, stderr.log: RuntimeError: DataLoader worker (pid N) is killed by signal: Killed." in text
    )
    assert "consequence  rank 0, failure.json: RuntimeError: [gloo/" in text or "Connection closed by peer" in text
    assert "page         ddpkit explain loader_worker_killed" in text
    assert "<b>loader_worker_killed</b>" in html


def test_html_is_escaped(tmp_path: Path) -> None:
    html = diagnosed(tmp_path, raised("ValueError", "<script>alert(1)</script>"))._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_a_job_of_many_ranks_shows_a_few_lines(tmp_path: Path) -> None:
    write_run(tmp_path, nproc=64)
    for rank in range(64):
        write_said(tmp_path, rank, raised("RuntimeError", UNUSED))
    found = diagnose(read(tmp_path), verdict("every rank", "own"))
    assert found is not None and len(found.evidence) == 64
    assert len(str(found).splitlines()) < 15 and "and 56 more ranks alike" in str(found)


def test_torchs_own_log_lines_are_quoted_without_time_and_port(tmp_path: Path) -> None:
    texts = set()
    for stamp, port, delay in (("1121 10:49:44.810465318", 29990, 1368), ("102 00:00:01.1", 5, 7)):
        log = (
            f"[W{stamp} TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host localhost:{port} - retrying "
            f"(try=0, timeout=4000ms, delay={delay}ms)\n"
        )
        texts.add(str(diagnosed(tmp_path / str(port), Said(stderr=log))))
    assert len(texts) == 1
    assert "[W TCPStore.cpp:340] [c10d] TCP client failed to connect/validate to host localhost:PORT" in texts.pop()


@pytest.mark.parametrize("made_up", ["[none]", "[6.0.0.0]", "[106.21.0.0]:512", "[fe80::6a15]:9", "[6.0.0.0]$12"])
def test_an_address_that_gloo_makes_up_is_left_out(made_up: str) -> None:
    assert stable(f"pair.h:311] Connect timeout {made_up}") == "pair.h:311] Connect timeout [none]"


def test_a_peer_that_gloo_was_connected_to_keeps_its_address() -> None:
    assert stable("Connection closed by peer [10.0.0.2]:512") == "Connection closed by peer [10.0.0.2]:PORT"
