"""What `Trainer` costs: its step against that of a bare hand-written DDP loop, same model, data and optimizer, side by side.

A round lets each way take `--steps` steps in turn, in one job of 2 ranks; see `kit.py`, whose parts are measured there. The
bare loop has what a careful hand writes: DistributedSampler, DataLoader, DDP, clipping, the fused AdamW. Both load their
data in the rank itself. The trainer's rounds hold all that it does between steps: figures exchanged, the bar, the log.

    python benchmarks/trainer.py --rounds 40 --write
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kit

import ddpkit

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
    from ddpkit.rank.example import language_model_loss

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
    import torch.distributed as dist

    from ddpkit.rank import TrainConfig, report, setup

    with setup() as here, tempfile.TemporaryDirectory() as folder:
        config = TrainConfig.from_args([*WORDS, f"--checkpoint-dir={folder}"])
        ways = {name: make(config, here, folder) for name, make in WAYS.items()}
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for step in ways.values():
            step(5)
        names = list(ways)
        for number in range(rounds):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                ways[name](steps)
                took[name].append(((time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps))
        report(took=took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"put the table into {kit.PAGE.name}")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        measure(asked.rounds, asked.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDPKIT_HOME"] = folder
        numbers = ["--rounds", str(asked.rounds), "--steps", str(asked.steps)]
        run = ddpkit.launch(__file__, args=numbers, nproc=2, backend="gloo", show=False).check()
        took: dict[str, Any] = run.reported[0]["took"]
    model = "the small transformer with 0.9 million parameters, 8 texts of 64 tokens on each rank"
    found = kit.table(took, f"python benchmarks/trainer.py {' '.join(numbers)} --write", model)
    print(found)
    if asked.write:
        kit.write(found)


if __name__ == "__main__":
    main()
