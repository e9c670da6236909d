"""Record for notebook 12 a job on a real Slurm of two hosts, one of which is killed while the job trains."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from slurm_cluster import cluster  # type: ignore[import-not-found]

import ddpkit
from ddpkit.runfolder import wire

RECORDING = Path(ddpkit.__file__).parent / "catalog" / "node_lost" / "slurm.zip"
TRAIN = """\
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from ddpkit.rank import setup

with setup() as here:
    torch.manual_seed(0)
    ddp = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(200):
        x = torch.randn(12, 8).chunk(here.world_size)[here.rank]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.2f}")
        time.sleep(0.05)
"""


def main() -> None:
    with cluster() as slurm, tempfile.TemporaryDirectory() as home:
        os.environ[wire.ENV_HOME] = home
        script = Path(home, "train.py")
        script.write_text(TRAIN, encoding="utf-8")
        run = ddpkit.launch(script, nproc=2, slurm=ddpkit.SlurmOptions(nodes=2), show=False, wait=False)
        while len(run.ranks) < 4 or any(rank.stdout.count("step") < 25 for rank in run.ranks):
            time.sleep(0.05)
        slurm.kill_node("n2")
        run.wait()
        assert run.diagnosis and run.diagnosis.name == "node_lost", run
        print(f"{run.bundle(RECORDING)}: {run}")


if __name__ == "__main__":
    main()
