"""Scores replies in separate processes with a limit of processor time per reply.

A reply can ask for a computation that no machine finishes, and that may hold Python's lock: in the environment host's
own process it would stop every tenant's environments. Here it costs one forked process.

A child imports its library once and forks the process that scores (:func:`serve`): one line of JSON per question. When
a score exceeds the limit, the fork is killed by SIGPROF, the child answers for it and forks again. A scorer's exception
is its answer. Up to :data:`MAX_CHILDREN` children of a tenant run in parallel; an idle one is ended. All end with their
parent. They have none of the service's ``ROOKERY_`` variables and write no file while they score. Needs POSIX.

``concurrent.futures`` and pebble start all their workers with the library loaded and measure wall time; a child here
costs a fork, is started when needed, and is measured by processor time, so a busy machine makes no reply wrong.

The scorers are math-verify and reasoning-gym. Replies such as ``9^{9^{9^9}}`` or ``1e9999999999`` take for ever to
evaluate exactly, and some scorers raise on unexpected input. A reply to reasoning-gym is scored with the entry as the
library made it: prompts are stored as JSON, which has no tuples, and some scorers compare with them.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from rookery.children import (
    add_child_seconds,
    child_variables,
    interpreter,
    lower_priority,
    lower_session_priority,
    open_session,
    set_session_priority,
)
from rookery.environments.verifiers.expressions import (
    as_written,
    content_of,
    contradict,
    differ_in_count,
    joined_relations,
    reply_latex,
    same_text,
    sides,
    significant_digits,
    split_choice,
    without_unit,
)
from rookery.environments.verifiers.sentences import brackets, congruence, congruent, lists
from rookery.environments.warm_processes import IDLE_SECONDS, WarmProcesses
from rookery.errors import short

LIMIT_SECONDS = 5.0
"""Processor time for one score: honest ones take milliseconds, an integral with a closed form up to five seconds on a
slow machine."""

MAX_CHILDREN = 4
"""Children per job, each a Python with its library. With this many, 44 of a job's 64 calls in progress may run away
before an honest reply behind them exceeds the default ``step_timeout`` of a minute."""

USUAL_DECIMALS, USUAL_DIGITS = 6, 15
"""math-verify's defaults."""

WALL, WALL_SECONDS = 5.0, 120.0
"""Time by the clock for an answer: this many times the processor time, and more for the start of a child on a busy
machine. A child that waits uses no processor time."""

LOW_PRIORITY = 5
"""Niceness of the children: somebody waits for each answer, but not before the service's and the workers' work."""

LONG_SECONDS, LOWEST_PRIORITY = 0.5, 19
"""Processor time of a score after which its process and its session have this niceness: a long one must not slow the
others' work."""

NEXT_FORK = 75
"""Exit code of a fork that has answered its only question."""

ANSWER = "\x1e"
"""Begins each answer of a child, and is nowhere within one: JSON escapes it. Whatever else comes first, such as a line
that the ``usercustomize`` of somebody's Python prints, is no answer."""


class VerifierTimeout(Exception):
    """A score exceeded its limit."""


class VerifierError(RuntimeError):
    """The scorer raised; the message is one line."""


MODULE = "rookery.environments.verifiers.pool"
"""The name of this module, which is ``__main__`` in a child."""


class VerifierPool:
    """Children that run ``module``, by default this one, which calls :func:`serve`, with ``scorer`` and its
    ``arguments``. Thread-safe; ``children`` scores at a time, each with ``limit`` seconds of processor time."""

    def __init__(
        self,
        scorer: str,
        *arguments: str,
        limit: float = LIMIT_SECONDS,
        module: str = MODULE,
        children: int = MAX_CHILDREN,
        wall_seconds: float = WALL_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._limit, self._wall_seconds = limit, wall_seconds
        command = interpreter(module, str(limit), scorer, *arguments)
        self._children = WarmProcesses(lambda: _Child(scorer, command), children, idle_seconds)

    def score(self, question: Mapping[str, Any], limit: float | None = None, memory: int | None = None) -> Any:
        """The scorer's answer. ``limit``: processor time for this question, if not the pool's; ``memory``: bytes that
        it may take. Raises :class:`VerifierTimeout`, :class:`VerifierError`, and RuntimeError if the child ended or
        did not answer."""
        with self._children.borrow() as child:
            asked = {"question": question, "limit": limit, "memory": memory}
            began, most = time.monotonic(), limit or self._limit
            try:
                answer = child.ask(asked, WALL * most + self._wall_seconds)
            except RuntimeError:  # how much it took is not known
                add_child_seconds(min(time.monotonic() - began, most))
                raise
        add_child_seconds(answer["seconds"])
        if "timeout" in answer:
            seconds = answer["timeout"] if limit is None else limit
            raise VerifierTimeout(f"not done within {seconds:g} s of processor time")
        if "error" in answer:
            raise VerifierError(answer["error"])
        return answer["score"]

    def close(self) -> None:
        """End all children; questions that they work on fail."""
        self._children.close()


class _Child:
    """A process with its library loaded and the process that it forked, in a process group."""

    def __init__(self, scorer: str, command: list[str]) -> None:
        self._scorer = scorer
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            env=child_variables({name: text for name, text in os.environ.items() if not name.startswith("ROOKERY_")}),
        )
        self._kill = weakref.finalize(self, _kill, self._process)
        self.used = time.monotonic()

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Raises RuntimeError where the child ended, or gave no answer in ``seconds`` by the clock: it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps(question)
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = _next_answer(self._process.stdout)
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if late.is_set():
            raise RuntimeError(f"the process of {self._scorer} gave no answer within {seconds:g} s")
        if not answer:
            code = self._process.wait()
            raise RuntimeError(f"the process of {self._scorer} ended with {code}; see its standard error")
        self.used = time.monotonic()
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def kill(self) -> None:
        """Ends a child that may be at work, whose ``ask`` then raises."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended just now
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ends an idle child: both processes read the end of their input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._kill()


def _next_answer(output: IO[str]) -> str:
    """Empty where the output ends."""
    for line in iter(output.readline, ""):
        if ANSWER in line:
            return line.rpartition(ANSWER)[2]
    return ""


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended just now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # an unread line is still in the buffer
                pipe.close()


def serve(
    prepare: Callable[[], Callable[..., Any]],
    *,
    opens_nothing: bool = False,
    one_question: bool = False,
    niceness: int = LOW_PRIORITY,
) -> None:
    """The child's side: reads questions from standard input and answers with what the scorer returns for their fields.
    Its priority is lower by ``niceness``.

    ``prepare`` returns the scorer; what it imports and builds is shared by every fork. ``opens_nothing`` states that
    scoring imports nothing and needs no file and no thread, so that the fork is denied them. With ``one_question``
    every question has a separate fork, so that the memory that one took is free for the next.
    """
    lower_priority(niceness)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end silently when the parent is gone
    limit = float(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # a library's output is no answer
    scorer = prepare()
    while forked := os.fork():
        status, used = _ended(forked)
        code = os.waitstatus_to_exitcode(status)
        if used >= LONG_SECONDS:  # it may have lowered the priority of all that follow
            lower_session_priority(os.getpid(), niceness)
        if code == NEXT_FORK:
            continue
        if code >= 0:
            sys.exit(f"the scoring process ended with {code}" if code else 0)
        ended = {"timeout": limit} if code == -signal.SIGPROF else {"error": signal.strsignal(-code) or str(code)}
        print(ANSWER + json.dumps({**ended, "seconds": used}), file=answers, flush=True)
    session = open_session(os.getpid())
    _confine(opens_nothing)
    signal.signal(signal.SIGVTALRM, lambda *_: _yield_processor(session))
    while line := sys.stdin.readline():
        began, asked = time.process_time(), json.loads(line)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONG_SECONDS)
        signal.setitimer(
            signal.ITIMER_PROF, asked["limit"] or limit
        )  # no handler: the signal ends this process at once
        try:
            with _memory(asked["memory"]):
                answer = {"score": scorer(**asked["question"])}
        except BaseException as error:  # includes a library's exit()
            answer = {"error": short(" ".join(f"{type(error).__name__}: {error}".split()))}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answer["seconds"] = time.process_time() - began
        print(ANSWER + json.dumps(answer), file=answers, flush=True)
        if one_question or answer["seconds"] > LONG_SECONDS:
            os._exit(NEXT_FORK)


def _ended(forked: int) -> tuple[int, float]:
    """The status with which the process ended, and its processor time."""
    _, status, usage = os.wait4(forked, 0)
    return status, usage.ru_utime + usage.ru_stime


def _yield_processor(session: int | None) -> None:
    """A computation of this process of the ``session`` takes long, so it yields to everybody else's work."""
    os.nice(LOWEST_PRIORITY)
    if session is not None and not set_session_priority(session, LOWEST_PRIORITY, tries=1):
        signal.setitimer(signal.ITIMER_VIRTUAL, LONG_SECONDS)  # try again then


@contextlib.contextmanager
def _memory(most: int | None) -> Iterator[None]:
    """Within, the process may take ``most`` bytes more than it has; ``MemoryError`` beyond them."""
    import resource  # POSIX only

    if most is None:
        yield
        return
    with open("/proc/self/statm", encoding="utf-8") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (now + most, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _confine(opens_nothing: bool) -> None:
    """Denies new files (and descriptors and processes) for good; a superuser may still fork."""
    import resource  # POSIX only

    denied = [resource.RLIMIT_FSIZE]
    if opens_nothing:
        denied += [resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC]
    for limit in denied:
        resource.setrlimit(limit, (0, 0))


LITERAL = "literal"
"""Field of a stored prompt that holds the entry as a Python literal."""


def stored(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as a JSON prompt, with :data:`LITERAL` where JSON alone would lose something."""
    # default=str keeps dates and the like readable
    readable: dict[str, Any] = json.loads(json.dumps(entry, default=str))
    with contextlib.suppress(Exception):  # not a literal, or not comparable
        written = repr(entry)
        if readable != entry and ast.literal_eval(written) == entry:
            readable[LITERAL] = written
    return readable


def restored(prompt: dict[str, Any]) -> dict[str, Any]:
    """The entry of a prompt made by :func:`stored`."""
    entry: dict[str, Any] = ast.literal_eval(prompt[LITERAL]) if LITERAL in prompt else prompt
    return entry


def create(task: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    """The library's dataset. Raises ImportError where the library is missing, and its own errors for bad arguments."""
    import reasoning_gym

    if task == "composite":
        from reasoning_gym.composite import DatasetSpec

        config = {**config, "datasets": [DatasetSpec(**part) for part in config.get("datasets", ())]}
    return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)


def prepare_reasoning_gym() -> Callable[[str | None, dict[str, Any]], float]:
    dataset = create(**json.loads(sys.argv[3]))

    def score(answer: str | None, prompt: dict[str, Any]) -> float:
        return float(dataset.score_answer(answer=answer, entry=restored(prompt)))

    with contextlib.suppress(Exception):  # the same error is reported when a reply is scored
        first = stored(dataset[0])
        for answer in (first["answer"], "1"):
            score(answer, first)
    return score


def prepare_math() -> Callable[..., Any]:
    """The scorer of :class:`~rookery.environments.verifiers.verifiers.Math`: compares a ``reply`` with the ``expected``
    LaTeX, or tells which of the ``answers`` have no expression. math-verify's own limits are off: the pool's limit also
    stops big integers."""
    from latex2sympy2_extended import math_normalization
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify import parse, parser, verify
    from sympy import Expr, Intersection, Rational, Union

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off

    math_normalization.units_regex = re.compile("(?!)()")  # it takes the last variable of a product for a unit
    # capital letters as symbols of their own, and as the small ones; ``parse`` has no argument for it
    readings = [
        functools.partial(latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=folds))
        for folds in (False, True)
    ]

    def expressions(latex: str, *, folds: bool = False) -> list[Any]:
        if parser.latex2sympy is not readings[folds]:
            parser.latex2sympy = readings[folds]
            parser.parse_latex_cached.cache_clear()
        found: list[Any] = parse(latex, parsing_timeout=None)
        return found

    def read(latex: str, *, folds: bool = False) -> list[Any]:
        """As :func:`expressions`; relations with a word between them are the set of their solutions."""
        word, parts = joined_relations(latex)
        with contextlib.suppress(Exception):  # relations of several variables
            if word:
                sets = [expressions(rf"\boxed{{{part}}}", folds=folds)[0].as_set() for part in parts]
                return [Union(*sets) if word == "or" else Intersection(*sets)]
        return expressions(latex, folds=folds)

    def score(reply: str = "", expected: str = "", answers: list[str] | None = None) -> bool | list[bool] | None:
        if answers is not None:
            return [as_written(answer) or _is_read(expressions(answer)) for answer in answers]
        gold, latex = read(expected), reply_latex(reply, words=as_written(expected))
        if not as_written(expected) and not _is_read(gold):
            return None
        if latex is None:
            return False
        if contradict(expected, latex):
            return False
        residues = [congruence(content_of(one)) for one in (expected, latex)]
        if any(residues):
            return congruent(*residues)
        enclosed = [brackets(content_of(one)) for one in (expected, latex)]
        if all(enclosed) and enclosed[0] != enclosed[1]:  # an interval, a tuple and a set
            return False
        if differ_in_count(expected, latex):
            return False
        computed = [read(rf"\boxed{{{side}}}") for side in sides(latex)]
        if computed and not all(one and verify(computed[0], one, timeout_seconds=None) for one in computed[1:]):
            return False
        (choice, text), (chosen, other_text) = split_choice(expected), split_choice(latex)
        if choice and chosen:
            return choice == chosen
        if text and choice:
            expected = rf"\boxed{{{text}}}"
        elif chosen and other_text:
            latex = rf"\boxed{{{other_text}}}"
        if as_written(expected) or as_written(latex):
            return same_text(expected, latex)
        whole = expected, latex
        (expected, measure, size), (latex, other, other_size) = without_unit(expected), without_unit(latex)
        if measure and other and measure != other:
            return False
        if bool(measure) is not bool(other) and _letters(read(whole[0])) & _letters(read(whole[1])):
            expected, latex = whole  # a letter of both, and no unit
        gold, given = read(expected), read(latex)
        if _folds(gold, given):
            gold, given = (read(text, folds=True) for text in (expected, latex))
        if measure and other and size != other_size and given and isinstance(given[0], Expr):
            given = [given[0] * Rational(other_size / size)]
        if (_is_value(gold) and _is_list(given)) or (_is_list(gold) and _is_value(given)):
            return False  # math-verify reads [3,3] as 3
        gold, given = _as_sets(*_with_imaginary_unit(gold, given))
        pairs = [_in_order(gold, given), *_without_per_cent(gold, given)]
        return any(verify(*both, **precision(both[0][0], expected), timeout_seconds=None) for both in pairs)

    score("1", "$1$")
    return score


def _is_read(found: Sequence[Any]) -> bool:
    """Whether math-verify found an expression, not only a text."""
    return any(not isinstance(one, str) for one in found)


def _is_value(found: Sequence[Any]) -> bool:
    """Whether math-verify found a number, or an expression of one."""
    from sympy import Expr

    return bool(found) and isinstance(found[0], Expr) and not getattr(found[0], "is_Matrix", False)


def _is_list(found: Sequence[Any]) -> bool:
    """Whether the text in which math-verify found an expression is an interval, a tuple, a set of several, or a union
    of these."""
    return any(lists(one) for one in found if isinstance(one, str))


def _letters(found: Sequence[Any]) -> set[str]:
    """The names of the variables."""
    from sympy import Basic

    return {str(letter) for one in found if isinstance(one, Basic) for letter in one.free_symbols}


def _folds(*sides: Sequence[Any]) -> bool:
    """Whether there are capital letters that may count as small ones: not where an expression has a letter in both
    forms, as R - r has."""
    from sympy import Symbol

    capitals = False
    for found in sides:
        names = {symbol.name for one in found if hasattr(one, "atoms") for symbol in one.atoms(Symbol)}
        if len({name.lower() for name in names}) < len(names):
            return False
        capitals |= any(name != name.lower() for name in names)
    return capitals


def _with_imaginary_unit(gold: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Both sides with ``i`` as the imaginary unit, where it is the only letter on either: next to others it may be an
    index."""
    from sympy import Basic, I

    letters = {letter for one in (*gold, *given) if isinstance(one, Basic) for letter in one.free_symbols}
    if {str(letter) for letter in letters} != {"i"}:
        return gold, given
    units = dict.fromkeys(letters, I)

    def replaced(side: list[Any]) -> list[Any]:
        return [one.subs(units) if isinstance(one, Basic) else one for one in side]

    with contextlib.suppress(TypeError, ValueError):  # an interval or an inequality: i is a variable
        return replaced(gold), replaced(given)
    return gold, given


def _as_sets(gold: list[Any], given: list[Any]) -> tuple[list[Any], list[Any]]:
    """Both sides, where one is an interval, or a union of some, and the other inequalities of one variable as sets."""
    from sympy import And, Eq, Interval, Union
    from sympy.core.relational import Relational

    def of(side: list[Any], other: list[Any]) -> list[Any]:
        first, second = side[:1], other[:1]
        solved = all(isinstance(one, Relational | And) and not isinstance(one, Eq) for one in (*first, *second))
        solved &= bool(first and second) and _letters(first) == _letters(second)
        bounded = any(isinstance(one, Relational | And) for one in first)
        if solved or (bounded and any(isinstance(one, Interval | Union) for one in second)):
            with contextlib.suppress(Exception):  # no inequality that sympy solves
                return [side[0].as_set()]
        return side

    return of(gold, given), of(given, gold)


def _in_order(gold: Sequence[Any], given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Both sides, where one is the values of several variables and the other a tuple as two tuples, in the order of the
    variables' names: math-verify compares such sides without regard to the order."""
    from sympy import Eq, FiniteSet, Interval, Symbol, Tuple

    def values(side: Sequence[Any]) -> Any:
        equations = side[0].args if side and isinstance(side[0], FiniteSet) else ()
        names = {one.lhs for one in equations if isinstance(one, Eq) and isinstance(one.lhs, Symbol)}
        if len(equations) < 2 or len(names) < len(equations):
            return None
        return Tuple(*(one.rhs for one in sorted(equations, key=lambda one: one.lhs.name)))

    def listed(side: Sequence[Any]) -> bool:
        return bool(side) and isinstance(side[0], Interval | Tuple)

    if (named := values(gold)) is not None and listed(given):
        return [named], given
    if (named := values(given)) is not None and listed(gold):
        return gold, [named]
    return gold, given


def _without_per_cent(gold: Sequence[Any], given: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Both sides without a per cent sign where one of them alone has it: 12.5 is 12.5%, as is 0.125. An answer without
    the sign that is below 1 is a share, and no number of per cent."""
    from sympy import Mul, Rational, UnevaluatedExpr

    def per_cent(one: Any) -> Any:
        """The number of per cent; None for any other expression."""
        hundredth = UnevaluatedExpr(Rational(1, 100))
        if not isinstance(one, Mul) or hundredth not in one.args:
            return None
        return Mul(*(part for part in one.args if part != hundredth))

    if not gold or not given:
        return []
    bare, replied = per_cent(gold[0]), per_cent(given[0])
    if (bare is None) is (replied is None):
        return []
    if bare is not None:
        return [([bare], [given[0]])]
    with contextlib.suppress(TypeError, OverflowError, ValueError):  # no number
        if abs(float(gold[0])) >= 1:
            return [([gold[0]], [replied])]
    return []


def precision(gold: Any, latex: str) -> dict[str, int]:
    """How exactly math-verify compares a reply with an expression, as arguments of its ``verify``: to its usual six
    decimals, six significant digits of a number below one, and to all digits that are written."""
    decimals = USUAL_DECIMALS
    if (getattr(gold, "is_Float", False) or getattr(gold, "is_Rational", False)) and gold:
        with contextlib.suppress(OverflowError, ValueError):  # beyond floats
            magnitude = math.floor(math.log10(abs(float(gold))))
            decimals = max(decimals, USUAL_DECIMALS - 1 - magnitude)
    return {"float_rounding": decimals, "numeric_precision": max(USUAL_DIGITS, significant_digits(latex))}


if __name__ == "__main__":
    if sys.argv[2] == "math":
        serve(prepare_math)  # sympy imports more of itself as replies need it: it has to open files
    else:  # scorers of 0.1.25 import nothing, open no file and start no thread
        serve(prepare_reasoning_gym, opens_nothing=True)
