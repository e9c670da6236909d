"""It compares two means, and always finds a difference."""


def answer(plain, other, now):
    took = {plain: 0.0, other: 0.0}
    for pair in range(25):
        for step in (plain, other) if pair % 2 else (other, plain):
            began = now()
            step()
            took[step] += now() - began
    return "slower" if took[other] > took[plain] else "faster"
