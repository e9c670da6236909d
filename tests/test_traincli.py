"""`ddpkit train` and `ddpkit smoke`: everything is checked before a rank starts, and what becomes of the job is told honestly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from test_records import write_rank, write_run
from typer.testing import CliRunner

from ddpkit import Run
from ddpkit.errors import LaunchError
from ddpkit.launcher import smoke_command
from ddpkit.launcher.smoke_command import smoke
from ddpkit.launcher.train_command import CONTEXT, TEST, train
from ddpkit.machine import devices
from ddpkit.runfolder import wire
from ddpkit.settings.training import TrainConfig

app = typer.Typer(add_completion=False)
app.command(context_settings=CONTEXT)(train)
app.command()(smoke)

TWO = [devices.Gpu(0, "GPU-a", "H"), devices.Gpu(1, "GPU-b", "H")]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[devices.Gpu]], None]:
    """Has this machine seem to have these GPUs, and a torch for them if there are any."""
    for name in ("CUDA_VISIBLE_DEVICES", wire.ENV_BACKEND):
        monkeypatch.delenv(name, raising=False)

    def there_are(found: list[devices.Gpu]) -> None:
        monkeypatch.setattr(devices, "all_gpus", lambda: found)
        monkeypatch.setattr("ddpkit.launcher.options.torch_has_cuda", lambda: bool(found))

    there_are([])
    return there_are


Gpus = Callable[[list[devices.Gpu]], None]


def dry(*words: str) -> tuple[list[str], str]:
    """The lines that `ddpkit train --dry-run` says before the command, and the command."""
    done = CliRunner().invoke(app, ["train", "--dry-run", *words])
    assert done.exit_code == 0, done.output
    *said, command = done.stdout.splitlines()
    return said, command


def refused(*words: str) -> str:
    """What `ddpkit train` says on stderr when nothing is started."""
    done = CliRunner().invoke(app, ["train", "--dry-run", *words])
    if isinstance(done.exception, LaunchError):  # `cli.py` prints that, and ends with 2
        return str(done.exception)
    assert done.exit_code == 2 and not done.stdout, done.output
    return done.stderr.strip()


# Where it runs.


def test_without_a_gpu_two_ranks_train_on_the_cpu_and_that_is_said(gpus: Gpus) -> None:
    said, command = dry()
    assert said == ["train: 2 ranks, gloo on the CPU (no GPU to use); 32 samples a step on each, 64 in all."]
    assert command == "DDP_BACKEND=gloo torchrun --standalone --nproc-per-node 2 -m ddpkit.rank.training"


def test_one_rank_for_each_gpu_or_for_those_that_are_chosen(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(TWO)
    said, command = dry("--batch-size", "8", "--gradient-accumulation-steps", "4")
    assert said[0] == "train: 2 ranks, nccl on GPU 0, 1; 32 samples a step on each, 64 in all."
    assert command.startswith("DDP_BACKEND=nccl torchrun --standalone --nproc-per-node 2 ")
    said, command = dry("-g", "1")
    assert said[0].startswith("train: 1 rank, nccl on GPU 1; 32 samples a step on each, 32 in all.")
    assert "CUDA_VISIBLE_DEVICES=1 CUDA_DEVICE_ORDER=PCI_BUS_ID torchrun --standalone --nproc-per-node 1" in command
    assert "2 ranks, gloo on the CPU (--cpu);" in dry("--cpu")[0][0]
    assert (
        "3 ranks, gloo on the CPU, although 2 GPUs are visible: nccl needs one for each rank;" in dry("-n", "3")[0][0]
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "1 rank, nccl on GPU 1;" in dry()[0][0]
    assert "asks for 0, but the GPUs visible here are 1;" in refused("-g", "0")


def test_gpus_that_are_not_there_are_one_sentence(gpus: Gpus) -> None:
    without_cuda = "train: --gpus 0,1 asks for 0, 1, but this torch was built without CUDA; name others, or use --cpu."
    assert refused("-g", "0,1") == without_cuda
    gpus(TWO)
    assert refused("-g", "0,3,x") == (
        "train: --gpus 0,3,x asks for 3, x, but the GPUs visible here are 0, 1; name others, or use --cpu."
    )
    assert refused("-g", "0,0") == "train: --gpus 0,0 names a GPU twice; each rank needs one of its own."
    assert refused("--cpu", "-g", "0") == "train: --cpu and --gpus 0 cannot be combined; leave one of them out."
    assert refused("-n", "0") == "launch: nproc=0 asked for; a job has at least one rank."
    assert 'backend "nccl", but 2 GPUs are visible. Use nproc=2' in refused("-n", "3", "--backend", "nccl")


def test_a_driver_without_a_gpu_that_may_be_used(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpkit.launcher.options.torch_has_cuda", lambda: True)
    assert refused("-g", "0") == "train: --gpus 0 asks for 0, but no GPU is visible here; name others, or use --cpu."


# What is trained.


def test_its_own_options_are_keys_of_the_configuration(gpus: Gpus) -> None:
    words = "-b 4 -e 3 -l here -c there --no-resume --max_restarts 2 --seed=-0 --hidden_size 64 --no-pin-memory"
    _, command = dry(*words.split())
    assert command == (
        "DDP_BACKEND=gloo torchrun --standalone --nproc-per-node 2 --max-restarts 2 -m ddpkit.rank.training "
        "--hidden-size 64 --batch-size 4 --num-epochs 3 --no-pin-memory --log-dir here --checkpoint-dir there --resume never"
    )
    assert "--resume" not in dry("--resume")[1]
    _, command = dry("--debug")
    assert command == (
        "DDP_BACKEND=gloo CUDA_LAUNCH_BLOCKING=1 TORCH_DISTRIBUTED_DEBUG=INFO torchrun --standalone --nproc-per-node 2 "
        "-m ddpkit.rank.training --log-level DEBUG"
    )


def test_a_test_is_small_whatever_the_file_says_and_options_come_last(gpus: Gpus, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {hidden_size: 1024, num_heads: 16}\ntraining: {seed: 4, num_epochs: 50}\n")
    file = ["--config", str(tmp_path / "c.yaml")]
    _, command = dry(*file, "--seed", "5")
    assert command.endswith("--hidden-size 1024 --num-heads 16 --num-epochs 50 --seed 5")
    _, command = dry("--test", *file, "--num-epochs", "3")
    config = TrainConfig.from_args(command.split("ddpkit.rank.training ")[1].split())
    small = TrainConfig.from_args(TEST)
    assert (config.hidden_size, config.seed, config.num_epochs) == (small.hidden_size, 4, 3)
    assert (small.num_epochs, small.resume) == (2, "never") and small.errors(2, "cpu") == []
    assert not Path(config.checkpoint_dir).parent.exists() and "ddpkit-train-" in config.log_dir
    assert "--checkpoint-dir kept " in dry("--test", "-c", "kept")[1]


def test_all_that_is_wrong_is_said_before_a_rank_starts(home: Path, gpus: Gpus) -> None:
    (home / "c.yaml").write_text("model: {hidden_size: 100, num_heads: 7}\n")
    words = "train --config c.yaml -b 6000 -n 4 --gpu 0 --hiden-size 3 --precision fp13 --backend nccl"
    done = CliRunner().invoke(app, words.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "Configuration errors:",
        "- there is no option --gpu; did you mean --gpus?",
        "- there is no option --hiden-size; did you mean --hidden-size?",
        "- training.precision must be one of auto, fp32, bf16, fp16 ('fp13' given); did you mean fp32?",
        "- model.hidden_size must be divisible by model.num_heads (100 and 7 given)",
        "- training.batch_size 6000 on 4 ranks takes 24000 samples for one step, but of data.dataset_size 10000 there are "
        "9000 to train on (1000 are held out)",
        "- distributed.backend nccl needs a GPU for each rank, and these ranks run on the CPU; take gloo, or none",
    ]
    assert not (home / ".ddpkit").exists()


def test_what_depends_on_the_backend_is_checked_when_that_is_decided(gpus: Gpus) -> None:
    """With GPUs the device is known only once the backend is; a fault for that rank count is refused all the same."""
    gpus(TWO)
    assert refused("-n", "2", "--fault", "kill:7:1") == (
        "Configuration errors:\n- run.fault kill:7:1 is for rank 7, and the last rank is 1"
    )


def test_help_and_keys() -> None:
    shown = CliRunner().invoke(app, ["train", "-h"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    for (
        option
    ) in "--gpus --batch-size --epochs --log-dir --checkpoint-dir --config --cpu --test --debug --resume".split():
        assert option in shown
    keys = CliRunner().invoke(app, ["train", "--keys"]).stdout
    assert all(key.option[2:] in keys for key in TrainConfig.keys().values())


# Real jobs.


@pytest.fixture
def ddpkit(home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the two commands as a program, without GPUs."""
    program = "import sys\nsys.path.insert(0, {!r})\nfrom test_traincli import app\napp()\n"

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program.format(str(Path(__file__).parent)), *words]
        settings = {**os.environ, "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", **env}
        return subprocess.run(command, capture_output=True, text=True, timeout=180, env=settings)

    return run


Ddpkit = Callable[..., subprocess.CompletedProcess[str]]


def newest(home: Path) -> Run:
    return Run.from_folder(max((home / ".ddpkit" / "runs").iterdir()))


@pytest.mark.job
def test_a_test_trains_in_seconds_and_goes_on_where_it_stood(home: Path, ddpkit: Ddpkit) -> None:
    first = ddpkit("train", "--test", "-c", "saved")
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.startswith(
        "train: 2 ranks, gloo on the CPU (no GPU to use); 8 samples a step on each, 16 in all.\n"
    )
    assert first.stdout.splitlines()[-1] == "train → passed · 2 ranks"
    steps = TrainConfig.from_args(TEST).total_steps(2)
    reported = newest(home).reported[0]
    assert (reported["steps"], reported["resumed_from"]) == (steps, 0) and reported["loss"] < 1
    assert list((home / "saved").iterdir()) and not (home / "logs").exists()
    second = ddpkit("train", "--test", "-c", "saved", "-e", "3", "--resume", "--max-restarts", "1")
    assert second.returncode == 0, second.stdout + second.stderr
    reported = newest(home).reported[0]
    assert (reported["steps"], reported["resumed_from"]) == (steps * 3 // 2, steps)


@pytest.mark.job
def test_a_training_that_fails_ends_with_1(home: Path, ddpkit: Ddpkit) -> None:
    failed = ddpkit("train", "--test", "--fault", "kill:1:3")
    assert failed.returncode == 1
    run = newest(home)
    assert run.culprit == 1 and run.ranks[1].signal == "SIGKILL"


@pytest.mark.job
def test_smoke_passes_or_says_what_its_failure_is_a_matter_of(ddpkit: Ddpkit) -> None:
    passed = ddpkit("smoke")
    assert passed.returncode == 0 and "[5/6] all-reduce: got 1, expected 1" in passed.stdout
    assert "next:" not in passed.stdout
    failed = ddpkit("smoke", GLOO_SOCKET_IFNAME="no-such-interface")
    assert failed.returncode == 1
    *_, step, explain, doctor = failed.stdout.splitlines()
    assert step.startswith("smoke: step 3 of 6 (init) failed on ranks 0, 1. During init: a matter of the network")
    assert explain == "smoke: next: ddpkit explain network_interface"
    assert doctor.startswith("smoke: next: ddpkit doctor checks this machine; ddpkit smoke --single runs")


@pytest.mark.job
def test_smoke_of_one_process_is_no_job(home: Path, ddpkit: Ddpkit) -> None:
    """Even where a rank's variables are left over in the shell."""
    passed = ddpkit("smoke", "--single", "--backend", "gloo", RANK="1", WORLD_SIZE="2", MASTER_ADDR="nowhere")
    assert passed.returncode == 0 and "[6/6] barrier and destroy: done, all steps passed" in passed.stdout
    failed = ddpkit("smoke", "--single", GLOO_SOCKET_IFNAME="no-such-interface")
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[-1].startswith(
        "smoke: a single process fails too, so communication is not the cause"
    )
    assert not (home / ".ddpkit").exists()


def test_smoke_refuses_what_cannot_be_started(gpus: Gpus) -> None:
    for words, said in (
        (["-n", "0"], "nproc=0 asked for"),
        (["--single", "--backend", "ncc"], 'backend "ncc" is not one of'),
    ):
        done = CliRunner().invoke(app, ["smoke", *words])
        assert isinstance(done.exception, LaunchError) and said in str(done.exception)


def test_smoke_reads_the_first_step_that_failed(tmp_path: Path) -> None:
    """A rank's later failure may follow from another's earlier one; a rank that was killed says nothing."""
    write_run(tmp_path)
    for rank, (printed, complained) in enumerate(
        (
            (
                "[1/6] variables: RANK=0\n[2/6] versions: torch\n",
                "[5/6] failed on rank 0: X: y\n[5/6] After init: later.\n",
            ),
            ("", "noise\n[3/6] failed on rank 1: RuntimeError: a\n  b\nmore\n[3/6] During init: the network.\n"),
        )
    ):
        write_rank(tmp_path, rank)
        logs = tmp_path / wire.LOGS / "none" / "attempt_0" / str(rank)
        logs.mkdir(parents=True)
        (logs / "stdout.log").write_text(printed)
        (logs / "stderr.log").write_text(complained)
    first, *_ = smoke_command.advice(Run.from_folder(tmp_path))
    assert first == "step 3 of 6 (init) failed on rank 1. During init: the network."
    for log in tmp_path.glob("logs/*/*/*/stderr.log"):
        log.write_text("")
    first, *_ = smoke_command.advice(Run.from_folder(tmp_path))
    assert first == "the last step that finished is 2 of 6 (versions); no rank could say what failed."
    for log in tmp_path.glob("logs/*/*/*/stdout.log"):
        log.write_text("")
    assert smoke_command.advice(Run.from_folder(tmp_path))[0] == "no step finished; no rank could say what failed."


def test_the_steps_are_those_of_the_test_itself() -> None:
    text = (Path(smoke_command.__file__).parents[1] / "rank" / "smoke.py").read_text()
    said = dict(re.findall(r'said\((\d), f?"([^:"]+):', text))
    assert [said[str(number)] for number in range(1, 7)] == list(smoke_command.STEPS)
