"""The example that `ddpkit train` trains: a transformer that learns, and data that is the same wherever it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import TORCH
from torch.utils.data import DataLoader

import ddpkit
from ddpkit.rank.trainer.example import SmallTransformer, SyntheticTokens, datasets, language_model_loss
from ddpkit.settings.training import TrainConfig

TINY = TrainConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, seq_len=16, dataset_size=256)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small matrices on one thread: on a busy machine two would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(size: int = 64, seq_len: int = 16, vocab_size: int = 64, seed: int = 0) -> SyntheticTokens:
    return SyntheticTokens(size, seq_len, vocab_size, seed)


def trained(steps: int, dtype: torch.dtype | None = None) -> tuple[list[float], SmallTransformer]:
    """The losses of some steps on a tiny model, and the model."""
    torch.manual_seed(0)
    model = SmallTransformer(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(datasets(TINY)[0], 16, shuffle=True, generator=torch.Generator().manual_seed(0), drop_last=True)
    losses: list[float] = []
    while len(losses) < steps:
        for inputs, targets in loader:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = language_model_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:steps], model


# The data.


def test_a_sample_is_its_index_and_seed_and_nothing_else() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    inputs, targets = texts()[3]
    assert torch.equal(torch.get_rng_state(), before), "making a sample must not draw from the global generator"
    assert (inputs.shape, inputs.dtype, targets.shape) == ((16,), torch.int64, (16,))
    assert torch.equal(inputs[1:], targets[:-1])
    torch.manual_seed(2)
    again = texts(size=1000)
    assert torch.equal(again[3][0], inputs)
    assert not torch.equal(again[4][0], inputs) and not torch.equal(texts(seed=1)[3][0], inputs)
    starts = {int(again[i][0][0]) for i in range(1000)}
    assert len(starts) > 60, "samples start all over the vocabulary"


@pytest.mark.parametrize("vocab_size", [2, 3, 64, 97, 10000])
def test_every_token_has_one_successor_and_no_two_the_same(vocab_size: int) -> None:
    data = texts(size=500, vocab_size=vocab_size, seed=vocab_size)
    follows: dict[int, int] = {}
    for inputs, targets in data:
        assert set(targets.tolist()) <= set(range(vocab_size))
        for token, following in zip(inputs.tolist(), targets.tolist(), strict=True):
            assert follows.setdefault(token, following) == following
    assert len(set(follows.values())) == len(follows)


def test_a_sample_that_is_not_there_is_one_sentence() -> None:
    assert len(list(texts())) == len(texts()) == 64
    for index in (64, -1):
        with pytest.raises(IndexError, match=rf"^SyntheticTokens: there is no sample {index}; there are 64\.$"):
            texts()[index]


def test_what_is_held_out_is_not_trained_on() -> None:
    train, held_out = datasets(TINY)
    assert held_out is not None
    assert (len(train), len(held_out)) == (TINY.train_size, TINY.eval_size) == (230, 26)
    assert torch.equal(held_out[0][0], texts(size=256)[230][0])
    assert datasets(TrainConfig(eval_fraction=0))[1] is None


@pytest.mark.job
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_workers_bring_the_same_batches(method: str) -> None:
    alone = list(DataLoader(texts(), 16))
    workers = list(DataLoader(texts(), 16, num_workers=2, multiprocessing_context=method))
    assert len(alone) == len(workers) == 4
    assert all(
        torch.equal(a, b) for one, two in zip(alone, workers, strict=True) for a, b in zip(one, two, strict=True)
    )


# The model.


@pytest.mark.job
def test_it_learns_and_does_so_bit_for_bit_again() -> None:
    losses, model = trained(200)
    assert abs(losses[0] - math.log(64)) < 0.5 and losses[-1] < 0.1
    assert trained(30)[0] == losses[:30]
    held_out = datasets(TINY)[1]
    assert held_out is not None
    model.eval()
    inputs, targets = next(iter(DataLoader(held_out, len(held_out))))
    assert language_model_loss(model(inputs), targets) < 0.1, "what it has not seen follows the same rule"


@pytest.mark.job
def test_it_learns_in_16_bits_and_the_loss_stays_in_32() -> None:
    losses, model = trained(60, torch.bfloat16)
    assert losses[-1] < losses[0] / 4
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.zeros(1, 4, dtype=torch.int64))
        assert logits.dtype == torch.bfloat16
        assert language_model_loss(logits, torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.float32


def test_a_token_sees_only_those_before_it() -> None:
    model = SmallTransformer(TINY).eval()
    text = torch.arange(10).unsqueeze(0)
    changed = text.clone()
    changed[0, 6] = 50
    one, other = model(text), model(changed)
    assert one.shape == (1, 10, 64)
    assert torch.equal(one[:, :6], other[:, :6])
    assert not torch.allclose(one[:, 6:], other[:, 6:])


def test_dropout_is_for_training_alone() -> None:
    model = SmallTransformer(TINY)
    text = torch.arange(10).unsqueeze(0)
    assert not torch.equal(model(text), model(text))
    model.eval()
    assert torch.equal(model(text), model(text))


def test_every_parameter_takes_part_even_for_a_short_text() -> None:
    model = SmallTransformer(TINY)
    language_model_loss(model(torch.zeros(2, 3, dtype=torch.int64)), torch.zeros(2, 3, dtype=torch.int64)).backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    assert len(model.blocks) == TINY.num_layers


def test_a_text_that_is_too_long_is_one_sentence() -> None:
    with pytest.raises(
        ValueError, match=r"a text of 17 tokens was given, and the model knows 16 positions; raise data\.seq_len"
    ):
        SmallTransformer(TINY)(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.job
def test_replicas_and_shards_train_as_one_process_does(script: Callable[..., str]) -> None:
    """Two ranks with half of the batch each, by DDP without any option and by FSDP2 block by block, against one process."""
    path = script(
        """
        import sys, torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        from ddpkit.settings.training import TrainConfig
        from ddpkit.rank import report, setup
        from ddpkit.rank.trainer.example import SmallTransformer, datasets, language_model_loss

        config = TrainConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, seq_len=16, dropout=0.0)
        texts = datasets(config)[0]
        whole = torch.utils.data.default_collate([texts[i] for i in range(8)])

        def steps(model, batch):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = language_model_loss(model(batch[0]), batch[1])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            full = lambda p: p.full_tensor() if hasattr(p, "full_tensor") else p
            return torch.cat([full(p).detach().flatten() for p in model.parameters()])

        def made():
            torch.manual_seed(0)
            return SmallTransformer(config)

        with setup(backend="gloo") as here:
            part = [t.chunk(here.world_size)[here.rank] for t in whole]
            reference = steps(made(), whole)
            apart = {"ddp": (steps(DDP(made()), part) - reference).abs().max()}
            if sys.argv[1] == "fsdp":
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.fsdp import fully_shard
                model, mesh = made(), init_device_mesh("cpu", (here.world_size,))
                for block in model.blocks:
                    fully_shard(block, mesh=mesh)
                apart["fsdp"] = (steps(fully_shard(model, mesh=mesh), part) - reference).abs().max()
            report(apart={way: float(value) for way, value in apart.items()}, largest=float(reference.abs().max()))
        """
    )
    run = ddpkit.launch(path, args=["fsdp" if TORCH >= (2, 6) else ""], show=False, timeout=120)
    assert run.ok, str(run)
    reported: list[dict[str, Any]] = list(run.reported.values())
    assert [set(r["apart"]) for r in reported] == [{"ddp", "fsdp"} if TORCH >= (2, 6) else {"ddp"}] * 2
    assert all(value < 1e-4 * r["largest"] for r in reported for value in r["apart"].values()), reported
