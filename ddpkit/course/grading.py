"""`check`: runs an answer again, with another seed and with a fault put in, and says what was called, got and wanted."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ddpkit.errors import LaunchError
from ddpkit.launcher.launcher import launch
from ddpkit.run import Run
from ddpkit.runfolder import steps, wire

from .evidence import mismatch
from .exercises import State, Task, seed, task
from .trial import run_recorded

FAULT = "1:1"


class NotYet(AssertionError):
    """The answer does not hold yet: what was called, what it got, what was wanted, where to look next."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class Finding(NamedTuple):
    """Why an answer does not hold; `look` is where to look next."""

    called: str
    got: str
    wanted: str
    look: str


@dataclass(frozen=True, repr=False)
class Passed:
    """The answer holds; `after` is what there is to say about it now."""

    name: str
    after: str

    def __repr__(self) -> str:
        return f"{self.name} holds. {self.after}".strip()


# A step of a check: what is looked at, and why it is not as wanted. A step with a finding is the last: no other is asked for.
Step = tuple[str, Finding | None]


def check(name: str, answer: Any, nproc: int | None = None) -> Passed:
    """Check `answer` to exercise `name`: run it again with another seed, and see that it covers nothing up.

    Args:
        name: such as "02.1".
        answer: what the exercise asks for: a run of the mended program, a function, or a dict of what the evidence says.
        nproc: ranks to run it with; by default the exercise's own.

    Raises:
        NotYet: it does not hold; the text says what was called, got and wanted, and where to look next.
        NoSuchTask: there is no exercise of that name.
    """
    asked = task(name)
    if answer is None or answer is Ellipsis:
        raise NotYet(f'{name} has no answer yet.\n  ddpkit.hint("{name}") gives a first hint.')
    finding = None
    for what, finding in _steps(asked, answer, nproc or asked.nproc):
        print(f"{name}: {what}: {'as wanted' if finding is None else 'not yet'}", flush=True)
        if finding is not None:
            break
    State.read().note(name, finding is None)
    if finding is None:
        return Passed(name, asked.after)
    titles = ("called", "got", "wanted", "look next")
    body = "\n".join(f"  {title + ':':<11}{text}" for title, text in zip(titles, finding, strict=True))
    raise NotYet(f'{name} does not hold yet.\n{body}\n  ddpkit.hint("{name}") gives a hint.')


def _steps(asked: Task, answer: Any, nproc: int) -> Iterable[Step]:
    """The steps that check `answer`, or one that says which kind of answer is wanted."""
    keys = ", ".join(asked.wants)
    kinds: dict[str, tuple[bool, Callable[..., Iterator[Step]], str, str]] = {
        "run": (isinstance(answer, Run), _of_run, "the run of your mended program", "the name after %%torchrun --as"),
        "function": (callable(answer), _of_function, "a function", "the name of the function, without calling it"),
        "evidence": (isinstance(answer, dict), _of_evidence, f"a dict with {keys}", "the cell above as you found it"),
    }
    fits, steps_of, wanted, look = kinds[asked.answer]
    if fits:
        return steps_of(asked, answer, nproc)
    return [("your answer", Finding("check", f"a {type(answer).__name__}", wanted, look))]


def _of_run(asked: Task, answer: Run, nproc: int) -> Iterator[Step]:
    mine = f"your run {answer.name}"
    if not answer.ok or not answer.script:
        got = answer.verdict.sentence or answer.state
        yield mine, Finding(mine, got, "a job that passes", f"print({answer.name}) names the rank and the line")
    yield mine, _not_kept(asked, answer.script)
    other = str(_other_seed())
    again = _recorded(asked, answer.script, nproc, {wire.ENV_SEED: other})
    yield "your program with another seed", _judged(asked, again, nproc, other)
    faulty = _recorded(asked, answer.script, nproc, {wire.ENV_SEED: other, wire.ENV_FAULT: FAULT})
    wrong = Finding(
        "your program, with an exception put into step 1 of rank 1",
        f"a job that {'passes' if faulty.ok else faulty.state}",
        "a job that fails, with rank 1's exception",
        "what catches exceptions in your program: a fault it did not expect must end the job",
    )
    caught = faulty.state != "failed" or faulty.culprit != 1
    yield "your program with a fault in rank 1", wrong if caught else None


def _not_kept(asked: Task, script: str) -> Finding | None:
    for text in asked.keep:
        if "".join(text.split()) not in "".join(script.split()):
            return Finding("your program", f"none with `{text}`", "that text as it was", "what the task says of it")
    return None


def _judged(asked: Task, run: Run, nproc: int, used_seed: str) -> Finding | None:
    called = f"your program on {nproc} ranks, with another seed"
    if not run.ok:
        return Finding(called, run.verdict.sentence or run.state, "a job that passes", "what holds for one seed only")
    apart = steps.replicas_apart(run.ranks)
    if apart is not None and not steps.equal(apart):
        got = f"replicas that are {apart:.2g} apart"
        return Finding(called, got, "equal parameters on every rank", "a step that one rank takes and another does not")
    if not asked.reference:
        return None
    reference = _recorded(asked, asked.reference, 1, {wire.ENV_SEED: used_seed, wire.ENV_RANKS: str(nproc)})
    off = steps.off_one_process(run.ranks, reference.ranks)
    if not steps.equal(off):
        got = "no optimizer step to compare" if off is None else f"parameters {off:.2g} off"
        wanted = "what one process computes from the whole batch"
        return Finding(called, got, wanted, "which samples, and which gradients, your program leaves out")
    return _not_reduced_once(called, run) if asked.reduced_once else None


def _not_reduced_once(called: str, run: Run) -> Finding | None:
    """What is wrong where DDP does not reduce each gradient once in a step, by the ranks' own records."""
    wanted = "gradients that DDP reduces once in each step"
    if run.replicas is None:
        return Finding(called, "no model in DDP", wanted, "who averages the gradients of the ranks")
    (first, *_), calls = steps.recorded(run.ranks), run.ranks[0].collectives
    reduced = sum(math.prod(size) for c in calls if c.op == "all_reduce" and "Float" in c.dtypes for size in c.sizes)
    times = round(reduced / (first.steps * sum(first.sizes)))
    if times == 1 or not calls:  # an older torch records no collectives of gloo
        return None
    got = f"gradients that are reduced {times} times in each step" if times else "gradients that are never reduced"
    return Finding(called, got, wanted, "how often a step calls backward(), and on what")


def _recorded(asked: Task, script: str, nproc: int, env: Mapping[str, str]) -> Run:
    name = f"check_{asked.name.replace('.', '_')}"
    return run_recorded(script, name, env, nproc=nproc, **asked.limits)


def _of_function(asked: Task, answer: Callable[..., Any], nproc: int) -> Iterator[Step]:
    # The exercise's own program calls the function. No rank can import it, so its functions travel with the call.
    harness = types.ModuleType("harness")
    exec(compile(asked.harness, f"exercise {asked.name}", "exec"), harness.__dict__)
    name = getattr(answer, "__name__", "your function")
    for used_seed in (seed(), _other_seed()):
        what = f"{name} on {nproc} ranks" + (", another seed" if used_seed != seed() else "")
        try:
            limits = {**asked.limits, "nproc": nproc, "stop_on_stall": True}
            run = launch(harness.call, args=(answer, used_seed), name=name, show=False, **limits)
        except LaunchError as error:
            yield what, Finding(name, str(error), "a function that can be sent to the ranks", "what it refers to")
            return
        if not run.ok:
            look = "the rank and the line that the verdict names"
            yield what, Finding(what, run.verdict.sentence or run.state, "a job that passes", look)
        wrong = harness.judge(run.returned, used_seed)
        yield what, Finding(what, *wrong) if wrong else None


def _of_evidence(asked: Task, answer: dict[str, Any], nproc: int) -> Iterator[Step]:
    for key, wanted in asked.wants.items():
        given = answer.get(key)
        called = f"answer[{key!r}]"
        if given is None or given is Ellipsis:
            yield key, Finding(called, "nothing", wanted["asked"], "the evidence of the run above")
        got = mismatch(given, wanted, asked.program, nproc)
        yield key, Finding(called, got, wanted["asked"], wanted["look"]) if got else None


def _other_seed() -> int:
    """A seed that the answer cannot have been made for."""
    mine = seed()
    other = mine
    while other == mine:
        other = random.SystemRandom().randrange(1, 10_000)
    return other
