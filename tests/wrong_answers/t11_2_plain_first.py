"""It has pairs, and the plain step always comes first."""


def answer(plain, other, now):
    apart = []
    for _ in range(25):
        began = now()
        plain()
        middle = now()
        other()
        apart.append(now() - middle - (middle - began))
    apart.sort()
    if apart[5] > 0:
        return "slower"
    return "faster" if apart[19] < 0 else "no difference"
