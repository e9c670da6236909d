"""It times all plain steps first, and then all others."""


def answer(plain, other, now):
    times = []
    for step in (plain, other):
        for _ in range(25):
            began = now()
            step()
            times.append(now() - began)
    apart = sorted(b - a for a, b in zip(times[:25], times[25:], strict=True))
    if apart[5] > 0:
        return "slower"
    return "faster" if apart[19] < 0 else "no difference"
