"""It counts in how many pairs the other step was longer."""


def answer(plain, other, now):
    longer = 0
    for pair in range(40):
        took = {}
        for step in (plain, other) if pair % 2 else (other, plain):
            began = now()
            step()
            took[step] = now() - began
        longer += took[other] > took[plain]
    if longer >= 29:
        return "slower"
    return "faster" if longer <= 11 else "no difference"
