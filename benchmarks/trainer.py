"""What `Trainer` costs: its step against that of a bare hand-written DDP loop, same model, data and optimizer, side by side.

A round lets each way take `--steps` steps in turn, in one job of 2 ranks; see `kit.py`, whose parts are measured there. The
bare loop has what a careful hand writes: DistributedSampler, DataLoader, DDP, clipping, the fused AdamW. Both load their
data in the rank itself. The trainer's rounds hold all that it does between steps: figures exchanged, the bar, the log.

    python benchmarks/trainer.py --rounds 40 --write
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kit

if TYPE_CHECKING:
    from ddpkit.rank import Here, TrainConfig

kit.MARK = "<!-- trainer -->"
BARE, AGAIN, TRAINER = "bare DDP loop", "the same once more", "`Trainer`"
WORDS = (
    "--vocab-size 256 --hidden-size 128 --num-layers 4 --num-heads 4 --seq-len 64 --dataset-size 20000 --batch-size 8 "
    "--num-workers 0 --no-save-checkpoints --target-loss 0 --eval-fraction 0 --warmup-steps 0 --num-epochs 1000"
).split()


def bare(config: TrainConfig, here: Here, folder: str) -> Callable[[int], None]:
    """The loop that one writes by hand."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from ddpkit.rank import SmallTransformer, SyntheticTokens
    from ddpkit.rank.trainer.example import language_model_loss

    torch.manual_seed(0)
    net = DistributedDataParallel(SmallTransformer(config).to(here.device), gradient_as_bucket_view=True)
    data = SyntheticTokens(config.dataset_size, config.seq_len, config.vocab_size)
    loader = DataLoader(data, config.batch_size, sampler=DistributedSampler(data))
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=0.01, fused=True)

    def steps(count: int) -> None:
        for inputs, targets in itertools.islice(loader, count):
            optimizer.zero_grad()
            loss = language_model_loss(net(inputs.to(here.device)), targets.to(here.device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

    return steps


def trained(config: TrainConfig, here: Here, folder: str) -> Callable[[int], None]:
    """The trainer, told to go on for so many steps."""
    from ddpkit.rank import Trainer

    trainer = Trainer(config, here)
    return lambda count: trainer.train(num_steps=trainer.step + count) and None


WAYS: dict[str, Callable[..., Callable[[int], None]]] = {BARE: bare, AGAIN: bare, TRAINER: trained}


def measure(rounds: int, steps: int) -> None:
    """Report, by way and round, seconds and CPU seconds of a step."""
    from ddpkit.rank import TrainConfig, report, setup

    with setup() as here, tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.from_args([*WORDS, f"--checkpoint-dir={folder}"])
        ways = {name: make(config, here, folder) for name, make in WAYS.items()}
        report(took=kit.in_turn(ways, rounds, steps))


def told(command: str, took: kit.Took, **_: Any) -> str:
    """The table."""
    return kit.table(
        took, command, "the small transformer with 0.9 million parameters, 8 texts of 64 tokens on each rank"
    )


if __name__ == "__main__":
    kit.launched(__file__, __doc__, measure, told)
