"""A wrong answer to exercise 13.2: the learning rate warms up once more after each restart."""

from torch import nn

from ddpkit.rank import Checkpoints


def answer(ddp, optimizer, schedule, loader, here, folder, steps):
    step, checkpoints = 0, Checkpoints(folder, here)
    if found := checkpoints.newest():
        shared, own = checkpoints.load(found)
        ddp.module.load_state_dict(shared["weights"])
        optimizer.load_state_dict(shared["optimizer"])
        loader.load_state_dict(own["data"])
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
                    {"weights": ddp.module.state_dict(), "optimizer": optimizer.state_dict()},
                    {"data": loader.state_dict()},
                )
            if step == steps:
                break
