"""`TrainConfig`: every key with its default, all that is wrong at once, and the ways in and out, which give the same again."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpkit.settings.read import Key
from ddpkit.settings.training import ConfigError, TrainConfig, validate_config

KEYS = TrainConfig.keys()

GUIDES = """
{vocab_size: 10000, hidden_size: 512, num_layers: 6, num_heads: 8, dropout: 0.1,
 batch_size: 32, learning_rate: 0.0001, weight_decay: 0.01, num_epochs: 10, use_amp: true,
 dataset_size: 10000, seq_len: 128, num_workers: 4, pin_memory: true,
 log_interval: 10, save_interval: 5, memory_check_interval: 50, checkpoint_interval: 100,
 target_loss: 0.01, max_errors_per_epoch: 5, max_memory_gb: 16.0, save_checkpoints: true,
 scheduler: linear_warmup, warmup_steps: 1000, gradient_accumulation_steps: 1, bucket_cap_mb: 25,
 log_dir: logs, checkpoint_dir: checkpoints}
"""
# The same configuration with sections and without.
SECTIONED = """
model:
  hidden_size: 256
  num_heads: 4
training:
  batch_size: "16"
  learning_rate: 3e-4        # YAML 1.1 takes it for a text
  warmup_steps: 1e2
  use_amp: false
data:
  seq_len: 64
distributed:
  parallel: fsdp
run:
  log_dir: 2026
"""
FLAT = """
hidden_size: 256
num_heads: 4
batch_size: 16
learning_rate: 0.0003
warmup_steps: 100
use_amp: false
seq_len: 64
parallel: fsdp
log_dir: "2026"
data:
"""


def refused(given: Any) -> str:
    """What is said about a mapping, or about the words of a command line."""
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_args(given) if isinstance(given, list) else TrainConfig.from_dict(given)
    assert str(caught.value) == "\n".join(["Configuration errors:", *(f"- {f}" for f in caught.value.faults)])
    return str(caught.value).removeprefix("Configuration errors:\n")


# The keys.


def test_every_key_of_the_guides_is_there_with_its_default() -> None:
    defaults = TrainConfig().to_dict()
    guides = yaml.safe_load(GUIDES)
    assert {name: defaults[name] for name in guides} == guides and TrainConfig.from_dict(guides).to_args() == []
    assert defaults["cleanup_interval"] == 0 and "frees nothing that is in use" in KEYS["cleanup_interval"].says
    assert TrainConfig().errors(8, "cuda") == TrainConfig().errors(2, "cpu") == []


def outside(key: Key) -> list[Any]:
    """Values that `key` cannot have."""
    found: list[Any] = [] if key.optional else [None]
    found += [["a", "list"], object] if key.kind == "str" else [["a", "list"], "many", "1.5.2"]
    found += ["other", True] if key.choices else []
    found += ["", "  "] if key.kind == "str" and not key.choices and not key.optional else []
    found += [True, 1.5, float("inf")] if key.kind == "int" else []
    found += [True, float("nan"), float("inf")] if key.kind == "float" else []
    found += [2, "maybe"] if key.kind == "bool" else []
    found += [key.least - 1] if key.least is not None else []
    return found + [limit for limit in (key.above, key.below) if limit is not None]


def inside(key: Key) -> list[Any]:
    """Values other than the default that `key` can have."""
    found: list[Any] = [None] if key.optional else []
    if key.kind == "bool":
        return [not key.default]
    if key.name == "fault":
        return ["kill:1:7"]
    if key.kind == "str":
        return found + list(key.choices or ("a b", "--odd=x", "none", "ü/1"))
    low = key.least if key.least is not None else 0.001
    below = key.below or 4e9
    values = [low, low + 1, low + 0.3, 1e-7, 7, 64, 123.25, 2**31]
    return found + [int(v) if key.kind == "int" else float(v) for v in values if low <= v < below]


@pytest.mark.parametrize("name", KEYS)
def test_each_key_says_what_it_is_and_refuses_what_it_cannot_be(name: str) -> None:
    key = KEYS[name]
    assert key.says and key.section and key.fault(key.default) == ""
    for value in outside(key):
        # Some values only a YAML file or a program can give.
        for found in (validate_config({name: value})[1], TrainConfig(**{name: value}).errors()):
            assert len(found) == 1 and found[0].startswith(f"{key.path} must "), (value, found)
    for value in inside(key):
        assert key.fault(value) == "", value


def test_what_is_said_of_one_key() -> None:
    for given, said in (
        ({"batch_size": "many"}, "training.batch_size must be a whole number ('many' given)"),
        ({"num_epochs": None}, "training.num_epochs must be a whole number (nothing given)"),
        ({"timeout_s": "soon"}, "distributed.timeout_s must be a number or none ('soon' given)"),
        ({"use_amp": "maybe"}, "training.use_amp must be true or false ('maybe' given)"),
        ({"log_dir": [1]}, "run.log_dir must be a text ([1] given)"),
        ({"log_dir": ""}, "run.log_dir must not be empty"),
        ({"batch_size": 0}, "training.batch_size must be at least 1 (0 given)"),
        ({"learning_rate": 0}, "training.learning_rate must be above 0 (0.0 given)"),
        ({"dropout": 1}, "model.dropout must be below 1 (1.0 given)"),
        ({"resume": False}, "run.resume must be one of auto, never (false given)"),
        (
            {"scheduler": "linear_warmpu"},
            "training.scheduler must be one of linear_warmup, constant ('linear_warmpu' given); did you mean linear_warmup?",
        ),
    ):
        assert refused(given) == f"- {said}"


# Keys that go together.


@pytest.mark.parametrize(
    ("changes", "world_size", "device", "said"),
    [
        (
            {"num_heads": 7},
            *(1, "cpu", "model.hidden_size must be divisible by model.num_heads (512 and 7 given)"),
        ),
        (
            {"dataset_size": 4, "batch_size": 1},
            *(1, "cpu", "data.eval_fraction 0.1 of 4 samples is not one sample; raise it, or 0 for no evaluation"),
        ),
        (
            {"dataset_size": 100},
            4,
            "cpu",
            "training.batch_size 32 on 4 ranks takes 128 samples for one step, but of data.dataset_size 100 there are 90 "
            "to train on (10 are held out)",
        ),
        (
            {"dataset_size": 30, "eval_fraction": 0},
            1,
            "cpu",
            "training.batch_size 32 on 1 rank takes 32 samples for one step, but of data.dataset_size 30 there are 30 "
            "to train on (0 are held out)",
        ),
        (
            {"dataset_size": 200, "gradient_accumulation_steps": 3},
            2,
            "cpu",
            "training.gradient_accumulation_steps 3 is more than the 2 micro-batches that an epoch has on 2 ranks; "
            "lower it, or batch_size",
        ),
        (
            {"use_amp": False, "precision": "fp16"},
            1,
            "cuda",
            "training.precision fp16 is mixed precision, and training.use_amp is false; take use_amp true, or precision auto",
        ),
        (
            {"backend": "nccl"},
            2,
            "cpu",
            "distributed.backend nccl needs a GPU for each rank, and these ranks run on the CPU; take gloo, or none",
        ),
        (
            {"backend": "gloo", "fallback": True},
            2,
            "cpu",
            "distributed.fallback goes from nccl to gloo, and distributed.backend is gloo already; leave one of them out",
        ),
        (
            {"static_graph": True, "find_unused_parameters": True},
            2,
            "cpu",
            "distributed.static_graph and distributed.find_unused_parameters exclude each other: a graph that never changes "
            "is searched once; keep one",
        ),
        (
            {"static_graph": True, "gradient_accumulation_steps": 2},
            2,
            "cpu",
            "distributed.static_graph and training.gradient_accumulation_steps exclude each other: DDP learns the graph in "
            "its first backward, and fails there under no_sync (expect_autograd_hooks_ INTERNAL ASSERT FAILED); leave out one",
        ),
        (
            {"parallel": "fsdp", "static_graph": True},
            2,
            "cuda",
            "distributed.static_graph belongs to ddp, and distributed.parallel is fsdp; leave out one or the other",
        ),
        (
            {"parallel": "fsdp", "bucket_cap_mb": 5, "gradient_as_bucket_view": False},
            2,
            "cuda",
            "distributed.bucket_cap_mb and distributed.gradient_as_bucket_view belong to ddp, and distributed.parallel is "
            "fsdp; leave out one or the other",
        ),
        ({"fault": "kill:7"}, 2, "cpu", "run.fault must be KIND:RANK:STEP, such as kill:1:7 ('kill:7' given)"),
        ({"fault": "kill:2:7"}, 2, "cpu", "run.fault kill:2:7 is for rank 2, and the last rank is 1"),
        ({}, 0, "cpu", "a job has at least one rank (world_size=0 given)"),
    ],
)
def test_what_cannot_go_together_is_one_sentence(
    changes: dict[str, Any], world_size: int, device: str, said: str
) -> None:
    assert TrainConfig(**changes).errors(world_size, device) == [said]
    assert validate_config(changes, world_size, device) == (False, [said])


def test_what_goes_together_passes() -> None:
    for changes, world_size, device in (
        ({"hidden_size": 1024, "num_heads": 16}, 2, "cpu"),
        ({"precision": "fp16"}, 2, "cpu"),
        ({"precision": "bf16"}, 2, "cuda"),
        ({"backend": "nccl"}, 8, "cuda"),
        ({"backend": "nccl"}, 8, ""),
        ({"dataset_size": 64, "eval_fraction": 0}, 2, "cpu"),
        ({"parallel": "fsdp"}, 1, "cpu"),
        ({"fallback": True}, 2, "cuda"),
    ):
        config = TrainConfig(**changes)  # type: ignore[arg-type]
        assert validate_config(config, world_size, device) == (True, [])


def test_all_faults_are_told_at_once() -> None:
    """A key that could not be read takes no part in the rules that need it: here, that of batches."""
    words = "--hiden-size 100 --num-heads=7 foo --dropout 2 --no-batch-size --batch-size many --precision fp13 --seed"
    assert refused(words.split()) == (
        "- there is no option --hiden-size; did you mean --hidden-size?\n"
        "- there is no option foo\n"
        "- there is no option --no-batch-size; did you mean --batch-size?\n"
        "- --seed needs a value after it\n"
        "- model.dropout must be below 1 (2.0 given)\n"
        "- training.batch_size must be a whole number ('many' given)\n"
        "- training.precision must be one of auto, fp32, bf16, fp16 ('fp13' given); did you mean fp32?\n"
        "- model.hidden_size must be divisible by model.num_heads (512 and 7 given)"
    )


def test_sizes_of_a_job() -> None:
    config = TrainConfig(dataset_size=1000, batch_size=8, gradient_accumulation_steps=4, num_epochs=3)
    assert (config.eval_size, config.train_size, config.global_batch(2)) == (100, 900, 64)
    # 57 micro-batches on each rank: 14 windows of 4, and one of 1.
    assert config.total_steps(2) == 45
    assert dataclasses.replace(config, max_steps=10).total_steps(2) == 10


# From files and mappings.


def test_yaml_with_sections_and_without_is_the_same(tmp_path: Path) -> None:
    found = []
    for text in (SECTIONED, FLAT):
        (tmp_path / "train.yaml").write_text(text)
        found.append(TrainConfig.from_yaml(tmp_path / "train.yaml"))
    expected = TrainConfig(
        hidden_size=256,
        num_heads=4,
        batch_size=16,
        learning_rate=3e-4,
        warmup_steps=100,
        use_amp=False,
        seq_len=64,
        parallel="fsdp",
        log_dir="2026",
    )
    assert found == [expected, expected]
    assert isinstance(found[0].warmup_steps, int)


def test_all_that_is_wrong_in_a_mapping() -> None:
    given = {
        "model": {"batch_size": 32, "hiden_size": 3},
        "trainin": {"batch_size": 1},
        "batch_size": {"per_rank": 2},
        1: 2,
        "training": {"scheduler": {"type": "constant"}, "deeper": {"x": 1}},
        "num_epoch": 2,
    }
    assert refused(given).split("\n") == [
        "- model.batch_size belongs in the section training",
        "- there is no key model.hiden_size; did you mean hidden_size?",
        "- there is no section trainin; did you mean training?",
        "- training.batch_size takes a whole number, and a section is given",
        "- there is no key 1",
        "- training.scheduler takes a text, and a section is given",
        "- there is no section training.deeper",
        "- there is no key num_epoch; did you mean num_epochs?",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "c.yaml holds nothing; write keys such as batch_size: 32, or leave the file out"),
        ("# only a comment\n", "c.yaml holds nothing; write keys such as batch_size: 32, or leave the file out"),
        ("- batch_size\n", "c.yaml holds a list; write keys such as batch_size: 32"),
        ("batch_size 32\n", "c.yaml holds a str; write keys such as batch_size: 32"),
        ("a: b: c\n", "c.yaml is not YAML: line 1, column 5: mapping values are not allowed here"),
        (
            "model:\n\thidden_size: 3\n",
            "c.yaml is not YAML: line 2, column 1: found character '\\t' that cannot start any token",
        ),
        ("model: !!python/name:os.system\n", "c.yaml is not YAML: line 1, column 8: could not determine a constructor"),
        ("training: {batch_size: 0}\n", "training.batch_size must be at least 1 (0 given)"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_yaml(tmp_path / "c.yaml")
    assert len(caught.value.faults) == 1 and caught.value.faults[0].startswith(said)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        refused(["--config", "train.yaml"])
        == f"- there is no file train.yaml in {tmp_path}; give the path of a YAML file"
    )
    Path("trian.yaml").write_text(FLAT)
    assert refused(["--config", "train.yaml"]).endswith("; did you mean trian.yaml?")
    Path("folder.yaml").mkdir()
    assert refused(["--config=folder.yaml"]).startswith("- folder.yaml is a folder")
    Path("bytes.yaml").write_bytes(b"log_dir: \xff\xfe\n")
    assert refused(["--config=bytes.yaml"]).startswith("- bytes.yaml is not YAML: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.skipif(sys.platform != "linux", reason="a file that nobody can read needs Linux")
def test_a_file_that_cannot_be_read() -> None:
    assert refused(["--config=/proc/self/mem"]) == "- /proc/self/mem cannot be read (Input/output error)"


# From a command line, and back.


def test_options_come_after_the_file_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("batch_size: 8\nseed: 3\nstatic_graph: true\n")
    words = f"--batch-size 64 --config {tmp_path / 'c.yaml'} --no-static-graph --num-epochs=2 --log_dir x --save-checkpoints off"
    found = TrainConfig.from_args(words.split(), base=TrainConfig(seed=1, seq_len=32))
    changed = {"batch_size": 64, "seed": 3, "num_epochs": 2, "log_dir": "x", "save_checkpoints": False, "seq_len": 32}
    assert found == TrainConfig(**changed)  # type: ignore[arg-type]
    assert TrainConfig.from_args(["--seed", "1", "--seed=2"]).seed == 2
    assert TrainConfig.from_args(["--num-workers", "none", "--profile", "--seed", "1"]) == TrainConfig(
        num_workers=None, profile=True, seed=1
    )


def test_the_programs_own_command_line_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--seed", "9"])
    assert TrainConfig.from_args().seed == 9


def test_an_option_of_the_caller_may_be_meant() -> None:
    with pytest.raises(ConfigError, match=r"no option --gpu; did you mean --gpus\?"):
        TrainConfig.from_args(["--gpu", "0,1"], others=["--gpus"])


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        TrainConfig.from_args(["--batch-size", "0", "-h"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for key in KEYS.values():
        assert key.option in text or f"--[no-]{key.option[2:]} " in text
    assert "--batch-size                    samples of one micro-batch, on each rank [32]" in text
    assert "--[no-]use-amp                  mixed precision where precision allows it [on]" in text
    assert "[auto; or fp32, bf16, fp16]" in text and "[120.0 s]" in text


def there_and_back(config: TrainConfig) -> None:
    assert TrainConfig.from_args(config.to_args()) == config
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config
    in_sections: dict[str, dict[str, Any]] = {}
    for name, value in config.to_dict().items():
        in_sections.setdefault(KEYS[name].section, {})[name] = value
    assert TrainConfig.from_dict(json.loads(json.dumps(in_sections))) == config


@pytest.mark.parametrize("name", KEYS)
def test_every_value_of_every_key_goes_there_and_back(name: str) -> None:
    assert TrainConfig().to_args() == []
    changed = [TrainConfig(**{name: value}) for value in inside(KEYS[name])]
    usable = [config for config in changed if not config.errors() and config != TrainConfig()]
    assert usable
    for config in usable:
        there_and_back(config)
        assert 1 <= len(config.to_args()) <= 2


def test_keys_together_go_there_and_back() -> None:
    draw, tried = random.Random(5), 0
    while tried < 50:
        names = draw.sample(list(KEYS), draw.randint(2, 20))
        config = TrainConfig(**{name: draw.choice(inside(KEYS[name])) for name in names})
        if not config.errors():
            there_and_back(config)
            tried += 1


# What makes it the same training.


@pytest.mark.parametrize("name", KEYS)
def test_a_resumed_job_must_share_what_makes_it_the_same_training(name: str) -> None:
    others = [TrainConfig(**{name: value}) for value in inside(KEYS[name]) if value != KEYS[name].default]
    for other in others:
        assert bool(other.changes_training(TrainConfig().to_dict())) == KEYS[name].same


def test_what_is_the_same_training() -> None:
    free = {name for name, key in KEYS.items() if not key.same}
    assert {"num_epochs", "max_steps", "log_dir", "checkpoint_interval", "num_workers", "bucket_cap_mb"} <= free
    assert not free & {"hidden_size", "seed", "batch_size", "gradient_accumulation_steps", "learning_rate", "seq_len"}
    assert TrainConfig(weight_decay=0).changes_training(TrainConfig(weight_decay=0.0).to_dict()) == ""
    assert TrainConfig(seed=1, batch_size=8, num_epochs=1).changes_training(TrainConfig().to_dict()) == (
        "training.batch_size is 32 there and 8 here, training.seed is 0 there and 1 here"
    )
    assert TrainConfig(seed=1).changes_training({}) == ""
