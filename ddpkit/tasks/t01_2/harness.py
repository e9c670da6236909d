"""Gives the answer a tracker that works, one that refuses the sign-in, and one that drops out later."""

import torch.distributed as dist

from ddpkit.rank import setup


class TrackerError(Exception):
    """What a tracker raises by itself."""


class Tracker:
    def __init__(self, fails_at):
        self.fails_at = fails_at
        self.calls, self.kept = 0, []

    def log(self, **values):
        self.calls += 1
        if self.calls >= self.fails_at:
            raise TrackerError("the service is gone")
        self.kept.append(values)


def call(answer, seed):
    told = {}
    with setup("gloo"):
        for way, fails_at in (("works", 1000), ("refuses", 0), ("drops out", 3 + seed % 3)):
            signed_in = []

            def connect(way=way, fails_at=fails_at, signed_in=signed_in):
                signed_in.append(Tracker(fails_at))
                if way == "refuses":
                    raise TrackerError("no key")
                return signed_in[0]

            told[way] = {"raised": "", "fails_at": fails_at}
            try:
                log = answer(connect)
                for step in range(8):
                    log(step=step, loss=seed / (step + 1))
            except Exception as error:
                told[way]["raised"] = f"{type(error).__name__}: {error}"
            tracker = signed_in[0] if signed_in else Tracker(0)
            told[way].update(signed_in=len(signed_in), calls=tracker.calls, kept=[one["step"] for one in tracker.kept])
            dist.barrier()
        told["stopped"] = _stopped(answer)
    return told


def _stopped(answer):
    """Whether Ctrl-C during the sign-in still ends the program."""

    def connect():
        raise KeyboardInterrupt

    try:
        answer(connect)
    except KeyboardInterrupt:
        return True
    return False


def judge(returned, seed):
    for way in ("works", "refuses", "drops out"):
        told = {rank: one[way] for rank, one in returned.items()}
        raised = {rank: one["raised"] for rank, one in told.items() if one["raised"]}
        if raised:
            rank, words = next(iter(raised.items()))
            return (
                f"{words}, on rank {rank}, with a tracker that {way}",
                "no exception",
                "which calls are inside the try",
            )
        if (count := sum(one["signed_in"] for one in told.values())) != 1:
            return f"{count} sign-ins by {len(told)} ranks", "one, by rank 0", "which rank calls connect()"
        first = told[0]
        last = min(8, first["fails_at"] - 1) if way != "refuses" else 0
        if first["kept"] != list(range(last)):
            return f"steps {first['kept']} in a tracker that {way}", f"steps 0 to {last - 1}", "what log passes on"
        if way == "drops out" and first["calls"] > first["fails_at"]:
            look = "what log does after the first failure: each call to a service that is gone costs all ranks time"
            return (
                f"{first['calls']} calls to a tracker that failed at call {first['fails_at']}",
                "no call after that",
                look,
            )
    if not returned[0]["stopped"]:
        return "Ctrl-C during the sign-in is caught", "KeyboardInterrupt", "which exceptions you catch"
    return None
