"""A wrong answer to exercise 13.2: the data begin again, and some samples count twice."""

from torch import nn

from ddpkit.rank import Checkpoints


def answer(ddp, optimizer, schedule, loader, here, folder, steps):
    step, checkpoints = 0, Checkpoints(folder, here)
    if found := checkpoints.newest():
        shared, _ = checkpoints.load(found)
        ddp.module.load_state_dict(shared["weights"])
        optimizer.load_state_dict(shared["optimizer"])
        schedule.load_state_dict(shared["schedule"])
        step = found.step
    while step < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x), y).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 4 == 0:
                checkpoints.save(
                    step,
                    {
                        "weights": ddp.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "schedule": schedule.state_dict(),
                    },
                    {},
                )
            if step == steps:
                break
