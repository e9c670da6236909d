"""A wrong answer to 01.2: every rank signs in."""


def answer(connect):
    tracker = None
    try:
        tracker = connect()
    except Exception as error:
        print(f"not tracked: {error}")

    def log(**values):
        nonlocal tracker
        try:
            if tracker:
                tracker.log(**values)
        except Exception:
            tracker = None

    return log
