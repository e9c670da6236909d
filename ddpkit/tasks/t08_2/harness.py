"""Asks the answer for a backend, where all ranks, none and one of them have no GPU, and compares the ranks' answers."""

import torch.distributed as dist

from ddpkit.rank import setup


class Broken:
    """A store whose host is gone."""

    def __getattr__(self, name):
        def fail(*args, **kwargs):
            raise RuntimeError("the store is gone")

        return fail


def call(answer, seed):
    with setup("gloo") as here:
        group, store = (getattr(dist.distributed_c10d, f"_get_default_{what}")() for what in ("group", "store"))
        odd = seed % here.world_size
        cases = {"every rank has a GPU": True, "no rank has one": False}
        cases |= {"one rank has none": here.rank != odd, "one rank alone has one": here.rank == odd}
        told = {}
        for number, (case, has_gpu) in enumerate(cases.items()):
            before = group._get_sequence_number_for_group()
            backend = answer(dist.PrefixStore(f"case {number}", store), here.rank, here.world_size, has_gpu)
            told[case] = {"backend": backend, "calls": group._get_sequence_number_for_group() - before}
            dist.barrier()
        return {"told": told, "swallows": _swallows(answer, here)}


def _swallows(answer, here):
    try:
        answer(Broken(), here.rank, here.world_size, False)
    except Exception:
        return False
    return True


def judge(returned, seed):
    ranks = list(returned.values())
    for case in ranks[0]["told"]:
        told = [r["told"][case] for r in ranks]
        got = " and ".join(repr(t["backend"]) for t in told)
        if len({t["backend"] for t in told}) > 1:
            return f"{got} on ranks 0 and 1, where {case}", "the same on every rank", "from what each rank decides"
        wanted = "nccl" if case == "every rank has a GPU" else "gloo"
        if told[0]["backend"] != wanted:
            return f"{got}, where {case}", f"{wanted!r}", "how the ranks' facts become one answer"
        if any(t["calls"] for t in told):
            return "a collective", "the store alone: there is no process group yet", "store.set and store.get"
    if any(r["swallows"] for r in ranks):
        return (
            "an answer, though the store was gone",
            "the store's exception",
            "what catches exceptions in your function",
        )
    return None
