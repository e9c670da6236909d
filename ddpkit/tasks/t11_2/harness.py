"""Asks the answer to compare steps whose lengths are known: with noise, on a machine that becomes slower, in any order."""

import random

from ddpkit.rank import setup

TIMES = 20
# What the other step takes of a plain step's time, and how much slower the machine becomes on the way.
CASES = {
    "two steps that are the same": (1.0, 1.0, "no difference"),
    "a step that is a fifth shorter": (0.8, 1.0, "faster"),
    "a step that is a fifth longer": (1.2, 1.0, "slower"),
    "two steps that are the same, on a machine that becomes slower": (1.0, 5.0, "no difference"),
}


class Machine:
    """A clock that only steps move on."""

    def __init__(self, chance, share, slower):
        self.ms, self.chance, self.share, self.slower, self.steps = 0.0, chance, share, slower, 0

    def now(self):
        return self.ms

    def plain(self):
        self.steps += 1
        load = 1 + (self.slower - 1) * min(self.steps / 60, 1)
        self.ms += 10 * load * self.chance.uniform(0.97, 1.03)

    def other(self):
        before = self.ms
        self.plain()
        self.ms = before + self.share * (self.ms - before)


def call(answer, seed):
    with setup("gloo") as here:
        chance, told = random.Random(seed + here.rank), {}
        for case, (share, slower, _) in CASES.items():
            said = []
            for _ in range(TIMES):
                machine = Machine(chance, share, slower)
                said.append(answer(machine.plain, machine.other, machine.now))
            told[case] = [said, machine.steps]
        return told


def judge(returned, seed):
    for told in returned.values():
        for case, (said, steps) in told.items():
            if steps < 40:
                return f"{steps} steps", "at least 20 pairs of steps", "how often your function calls the two"
            wanted = CASES[case][2]
            if said.count(wanted) < 0.75 * TIMES:
                other = max((word for word in said if word != wanted), key=said.count)
                got = f"{other!r} for {case}, {said.count(other)} times of {TIMES}"
                look = "which step comes first in a pair, and what your function says of an interval that covers zero"
                return got, repr(wanted), look
    return None
