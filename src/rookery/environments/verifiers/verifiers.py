"""Named verifiers: the reward of a reply, given the row's answer.

Each is a pure function (reply text, row, options) → (reward, metrics) with the same result in every process. Metrics
are shares in [0, 1]. No reply makes a verifier raise: an unreadable one scores ``wrong``. ``check`` converts a row's
answer as ``score`` does: a row without an answer that the verifier can compare with raises ValueError in both.
"""

from __future__ import annotations

import decimal
import importlib.util
import json as json_module
import logging
import math as math_module
import re
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import regex
from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rookery.bounds import METRICS, NAME, GivenModel, Integer, Line, Name, SmallJson
from rookery.environments.judges import require_judge
from rookery.environments.models import Ask
from rookery.environments.sandbox.rows import code_of, task_of
from rookery.environments.sandbox.rows import score as code_score
from rookery.environments.sandbox.sandbox import ProgramLimits, Sandbox
from rookery.environments.verifiers.constants import LISTED, best_of, densest, example, most_common, shortened, spread
from rookery.environments.verifiers.echoes import repeats_question
from rookery.environments.verifiers.expressions import gold_latex
from rookery.environments.verifiers.grader_templates import item_of, paths
from rookery.environments.verifiers.graders import (
    AnyGrader,
    check_item,
    check_templates,
    grade,
    reads_reply,
    single,
)
from rookery.environments.verifiers.json_objects import objects
from rookery.environments.verifiers.numbers import numbers, plain_number
from rookery.environments.verifiers.parts import ReplyPart
from rookery.environments.verifiers.pool import VerifierError, VerifierPool, VerifierTimeout
from rookery.environments.verifiers.running_graders import GraderTools, PythonGrader, check_source
from rookery.environments.verifiers.texts import HYPHENS, decimal_of, described, folded, spaced, text_or_number, visible
from rookery.errors import UserError, installs
from rookery.protocol import BestConstant
from rookery.spec.values import Rounded, unique_fields

log = logging.getLogger("rookery.environments")

Row = Mapping[str, Any]
Score = tuple[float, dict[str, float]]

REGEX_SECONDS = 1.0
"""Longest search for a pattern in one reply; an honest one takes microseconds."""

PATTERN = 10_000
"""Characters of a regular expression."""

ANSWERS_SECONDS, ANSWERS_AT_ONCE, MOST_ANSWERS_READ = 30.0, 32, 50_000
"""Longest time to read a job's different answers with math-verify, answers read per question (a few milliseconds each,
well within the limit of a score), and answers read at all. An answer past these is first read when it is compared."""

_READABLE = re.compile(r"\\boxed\{-?(?:\d+(?:\.\d+)?|\d+/[1-9]\d*|\\frac\{\d+\}\{[1-9]\d*\})\}", re.ASCII)
"""Answers that math-verify is known to read: most of them."""

_LITERAL_BRACE = re.compile(
    r"(\\[pPN]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*+\])|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL | re.ASCII
)
"""A brace that is itself in Python's syntax, as in ``x_{i}``: to the library it would permit errors of the match.
Group 1 is what else may hold one."""

OBJECTS_TRIED = 1000
"""Places of a reply where a JSON object may begin that are tried."""

_EXACT = decimal.Context(prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])
"""Differences of numbers of any size, rounded but never to zero."""


class AnyVerifier(ReplyPart):
    """The interface of all verifiers."""

    def score(self, text: str, row: Row, raw: str = "", special: Sequence[str] = ()) -> Score:
        """The reward of a reply and its metrics. A reply with special tokens has them in ``raw`` and ``special``, as
        :class:`~rookery.environments.base.Reply` does."""
        part = self.part(text, raw, special)
        reward, metrics = self.judge(part, row)
        return reward, {**metrics, "answered": float(part is not None)} if self.selects else metrics

    def may_read(self, name: str) -> bool:
        """Whether the field ``name`` of a row may matter to it."""
        return False

    @abstractmethod
    def judge(self, text: str | None, row: Row) -> Score:
        """The reward and the metrics of the judged part of a reply, None where the reply lacks that part."""

    @abstractmethod
    def check(self, row: Row) -> None:
        """Raises ValueError, naming the field, if ``row`` lacks an answer that the verifier can compare with."""

    def check_options(self) -> None:
        """Raises :class:`~rookery.errors.UserError` for options that take much work to check: in a confined process."""

    def first_unfit(self, rows: Iterable[Row]) -> tuple[int, str] | None:
        """The index of the first row that :meth:`check` refuses, and the reason; None if all fit."""
        for index, row in enumerate(rows):
            try:
                self.check(row)
            except ValueError as error:
                return index, str(error)
        return None

    def best_constant(self, rows: Sequence[Row]) -> BestConstant | None:
        """The fixed reply that earns most on the rows, None where the verifier knows none."""
        rows = spread(rows)
        replies = self.constants(rows)
        return best_of(
            [*replies, ""] if replies else [], rows, lambda reply, row: self.judge(reply, row)[0], self.enclose
        )

    def constants(self, rows: Sequence[Row]) -> list[str]:
        """Judged parts of fixed replies that earn much on the rows; none where the verifier knows none."""
        return []

    def first_unread(self, rows: Iterable[Row]) -> tuple[int, str] | None:
        """As :meth:`first_unfit` for rows that fit, where only another library shows whether it can read an answer:
        each different answer is read once, within a limit of time."""
        return None


class VerifierOptions(AnyVerifier):
    """Options of all verifiers; `json` has `after` and `tag` only. Their metric is `right`, the share of right replies;
    with `after` or `tag` also `answered`, the share of replies that have that part."""

    answer: Name = "answer"
    """The row's field that holds the answer."""
    right: float = 1.0
    """Reward of a right reply."""
    wrong: float = 0.0
    """Reward of any other reply."""

    def may_read(self, name: str) -> bool:
        return name == self.answer

    def expected(self, row: Row) -> Any:
        """The answer as the verifier compares with it. Raises ValueError where the row has none."""
        if self.answer not in row:
            raise ValueError(f"the row has no field {self.answer!r}; it has {', '.join(map(repr, row)) or 'none'}")
        value = row[self.answer]
        if isinstance(value, Rounded) and not self.takes(value):
            raise ValueError(f"{self.answer} is {value.loss}")
        return self.gold(value)

    def takes(self, value: Rounded) -> bool:
        """Whether replies can be compared with a number that lost digits as with the one that was written."""
        return False

    @abstractmethod
    def gold(self, value: Any) -> Any:
        """The converted value of the answer's field. Raises ValueError for one that no reply can be compared with."""

    def check(self, row: Row) -> None:
        self.expected(row)

    def constants(self, rows: Sequence[Row]) -> list[str]:
        chosen = most_common(rows, lambda row: _key(self.expected(row)))
        proposed = [(self.write(self.expected(row)), row) for row in chosen]
        return [text for text, row in proposed if text is not None and self.judge(text, row)[1]["right"]]

    def write(self, gold: Any) -> str | None:
        """The judged part of a reply with this answer; None where the verifier knows none."""
        return f"{gold:f}" if isinstance(gold, Decimal) else gold

    def score_of(self, right: bool) -> Score:
        return (self.right if right else self.wrong), {"right": float(right)}


class Exact(VerifierOptions):
    """Right when the reply reads as the answer: an answer that is a text as the same characters, where composed and
    decomposed letters are the same, any white space is one space, any hyphen is the plain one, and surrounding white
    space and characters without a shape do not count; an answer that is a number as a number of the same value. Any
    other answer is refused."""

    name: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without regard to case."""

    def gold(self, value: Any) -> str | Decimal:
        return text_or_number(value, self.answer)

    def judge(self, text: str | None, row: Row) -> Score:
        expected = self.expected(row)
        return self.score_of(text is not None and _reads_as(text, expected, self.ignore_case))


class Number(VerifierOptions):
    """Right when the number in the reply equals the answer. A number has a sign (`-5`, `-$5`, also with other dashes),
    groups of three digits (`1,234`, `1 234`, `1{,}234`), a point before decimals, an exponent (`1e-5`), and may stand
    in LaTeX or Markdown. Part of a larger expression is no number: `3/4`, `1.5 x 10^8`, `3-5`, `12:30`, `5th`, `5
    million`, `1,5`. Further metric: `number`, the share of replies with a number."""

    name: Literal["number"] = "number"
    where: Literal["last", "first", "any", "only"] = "last"
    """Which number of the reply counts; where the last or the first is part of a larger expression, none counts. With
    `any`, a reply that lists many numbers scores by luck; with `only`, the reply is the number and nothing else."""
    tolerance: float = Field(0.0, ge=0)
    """Largest absolute difference that counts as right."""
    found: float | None = None
    """Reward, instead of `wrong`, of a reply with a wrong number."""

    def gold(self, value: Any) -> Decimal:
        number = plain_number(value) if isinstance(value, str) else decimal_of(value)
        if number is None:
            raise ValueError(f"{self.answer} is {described(value)}, not a number; write it in digits, such as -1234.5")
        return number

    def takes(self, value: Rounded) -> bool:
        return self._close(Decimal(value.written), Decimal(repr(value)))

    def judge(self, text: str | None, row: Row) -> Score:
        expected = self.expected(row)
        chosen = self._chosen(text or "")
        right = any(self._close(number, expected) for number in chosen)
        reward, metrics = self.score_of(right)
        if chosen and not right and self.found is not None:
            reward = self.found
        return reward, {**metrics, "number": float(bool(chosen))}

    def _chosen(self, text: str) -> list[Decimal]:
        """The numbers of which one has to be right."""
        if self.where == "only":
            found = [plain_number(text)]
        elif self.where == "any":
            found = list(numbers(text))
        else:
            found = [next(numbers(text, backwards=self.where == "last"), None)]
        return [number for number in found if number is not None]

    def constants(self, rows: Sequence[Row]) -> list[str]:
        golds = [self.expected(row) for row in rows]
        proposed = super().constants(rows)
        if self.tolerance and golds:
            proposed.append(f"{densest(golds, Decimal(repr(self.tolerance))):f}")
        if self.where == "any":
            proposed.append("; ".join(f"{gold:f}" for gold in most_common(golds, hash, LISTED)))
        return proposed

    def _close(self, given: Decimal, expected: Decimal) -> bool:
        return _within(given, expected, self.tolerance)


def _compile(pattern: str) -> regex.Pattern[str]:
    """The pattern, written as the replies are read: one with a no-break space would match nothing."""
    written = spaced(re.sub(f"[{HYPHENS}]", r"\\-", pattern))  # within brackets a plain one makes a range
    return regex.compile(_LITERAL_BRACE.sub(lambda found: found[1] or r"\{", written))


class Regex(VerifierOptions):
    """Right when the pattern is found in the reply and, if it has a group, the group's text in the first match reads as
    the answer, as with [exact](#exact). Without a group the pattern alone decides. The pattern sees composed letters,
    plain spaces and no characters without a shape. Further metrics: `matched`, and `unjudged` for a search that was
    stopped after a second."""

    skips_thinking: ClassVar[bool] = False
    name: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(max_length=PATTERN)]
    """A regular expression in Python's syntax."""
    group: Integer | Name | None = None
    """Number or name of the group that is compared with the answer; the first group when absent."""
    whole: bool = False
    """The pattern must match the whole reply, ignoring surrounding white space."""
    found: float | None = None
    """Reward, instead of `wrong`, of a reply that matches with the wrong text in the group."""

    _compiled: regex.Pattern[str] = PrivateAttr()
    """Kept here: in a cache of all verifiers, the patterns of one tenant would displace those of another."""

    @model_validator(mode="after")
    def _compiles(self) -> Regex:
        try:
            pattern = self._compiled = _compile(self.pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise ValueError(f"pattern is not a valid regular expression: {error}") from None
        known = [*range(pattern.groups + 1), *pattern.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(f"group is one of the pattern's: {', '.join(map(str, known))}")
        return self

    @property
    def _compared(self) -> int | str | None:
        return self.group if self.group is not None else (1 if self._compiled.groups else None)

    def gold(self, value: Any) -> str | Decimal:
        return text_or_number(value, self.answer)

    def check(self, row: Row) -> None:
        if self._compared is not None:
            self.expected(row)

    def judge(self, text: str | None, row: Row) -> Score:
        pattern = self._compiled
        search = pattern.fullmatch if self.whole else pattern.search
        expected = self.expected(row) if self._compared is not None else None
        unjudged, match = False, None
        try:
            if text is not None:
                searched = spaced(text).strip() if self.whole else spaced(text)
                # concurrent: releases the lock for other threads of the host
                match = search(searched, timeout=REGEX_SECONDS, concurrent=True)
        except TimeoutError:
            unjudged = True
        if match is None:
            right = False
        elif expected is None:
            right = True
        else:
            right = _reads_as(match[self._compared] or "", expected)
        reward, metrics = self.score_of(right)
        if match is not None and not right and self.found is not None:
            reward = self.found
        return reward, {**metrics, "matched": float(match is not None), "unjudged": float(unjudged)}

    def constants(self, rows: Sequence[Row]) -> list[str]:
        if self._compared is not None:
            return super().constants(rows)
        text = self.write("")
        return [text] if text is not None and rows and self.judge(text, rows[0])[1]["right"] else []

    def write(self, gold: Any) -> str | None:
        return example(self.pattern, self._compared, super().write(gold) or "")


class Expectation(GivenModel):
    """The expected value of one field of a JSON reply. Give exactly one of `from` and `equals`. Values are compared as
    JSON: 5 and 5.0 are equal, 5 and "5" are not."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    from_: Name | None = Field(None, alias="from")
    """The row's field that holds the value."""
    equals: SmallJson = None
    """The value itself."""
    weight: float = Field(1.0, gt=0)
    """Share of the reward, relative to the other fields' weights."""
    tolerance: float = Field(0.0, ge=0)
    """Largest difference between numbers that counts as right."""

    @model_validator(mode="after")
    def _one_source(self) -> Expectation:
        if (self.from_ is None) == ("equals" not in self.model_fields_set):
            raise ValueError("exactly one of from (a field of the row) and equals (a value)")
        return self

    def expected(self, name: str, row: Row) -> Any:
        if self.from_ is None:
            return self.equals
        if self.from_ not in row:
            raise ValueError(f"the row has no field {self.from_!r}, which fields.{name} compares with")
        return row[self.from_]


class Json(AnyVerifier):
    """A reply that is a JSON object earns `valid`; each right field earns its share of 1 − `valid`. Metrics: `valid`,
    and `right/<field>` for each field."""

    name: Literal["json"] = "json"
    fields: dict[Annotated[str, Field(max_length=NAME - len("right/"))], Expectation] = Field(
        default_factory=lambda: {"answer": Expectation.model_validate({"from": "answer"})},
        min_length=1,
        max_length=METRICS // 2,
    )
    """Expected value of each field of the reply: the name of a row's field, or [an expectation](#json-fields)."""
    valid: float = Field(0.3, ge=0, le=1)
    """Reward of any valid reply. An invalid one earns 0."""
    strict: bool = False
    """The reply is the object and nothing else. Otherwise the first object in the reply counts, but none within an
    object that is cut off or is not JSON."""
    only: bool = False
    """A field that is not in `fields` makes the reply invalid."""

    @field_validator("fields", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: {"from": field} if isinstance(field, str) else field for name, field in value.items()}
        return value

    def may_read(self, name: str) -> bool:
        return any(field.from_ == name for field in self.fields.values())

    def check(self, row: Row) -> None:
        for name, field in self.fields.items():
            field.expected(name, row)

    def judge(self, text: str | None, row: Row) -> Score:
        given = _first_object(text or "", self.strict)
        if given is not None and self.only and set(given) - set(self.fields):
            given = None
        metrics = {"valid": float(given is not None)}
        earned = []
        for name, field in self.fields.items():
            expected = field.expected(name, row)
            right = given is not None and name in given and _same(given[name], expected, field.tolerance)
            metrics[f"right/{name}"] = float(right)
            earned.append(field.weight * right)
        if given is None:
            return 0.0, metrics
        share = math_module.fsum(earned) / math_module.fsum(field.weight for field in self.fields.values())
        return self.valid + (1 - self.valid) * share, metrics  # 1 where every field is right

    def constants(self, rows: Sequence[Row]) -> list[str]:
        return [json_module.dumps({name: self._constant(name, rows) for name in self.fields})] if rows else []

    def _constant(self, name: str, rows: Sequence[Row]) -> Any:
        """The value of one field that is right in most rows: the fields earn independently of each other."""
        field = self.fields[name]
        values = [field.expected(name, row) for row in rows]
        numeric = [number for number in map(decimal_of, values) if number is not None]
        if field.tolerance and len(numeric) == len(values):
            return float(densest(numeric, Decimal(repr(field.tolerance))))
        return most_common(values, lambda value: json_module.dumps(value, sort_keys=True), 1)[0]


class Math(VerifierOptions):
    r"""Right when math-verify finds the reply's last `\boxed{…}`, or without a box its last expression, in LaTeX or
    plain text, equal to the answer: a number, or one expression in LaTeX or as programs write it (`pi/2`, `sqrt(3)`,
    `x**2`). Words, sequences of capital letters (`BCA`), several lines, sets with a condition and answers that begin
    with a relation are compared as they are written; a reply without a box may end with such letters, a choice, words,
    several numbers (`5 and 6`) or a ratio (`3 to 2`). An interval, a tuple or a set of several is no number: `[3,3]` is
    not 3. Congruences are equal where residue and modulus are. Of two choices the letters count (`(D) 12`), of one its
    letter or its text. A capital letter is the small one, unless the answer or the reply has both, as `R - r` has; two
    or three small letters are a product, `ab` is `ba`, and `i` is the imaginary unit where it is the only letter. A
    whole number is compared exactly, others to six decimals, or of an answer below 1 to six significant digits. `5!` is
    a factorial, except at the end of a sentence. A per cent sign may be missing: `12.5\%` equals 12.5 and 0.125. A unit
    or a currency may be missing; lengths, areas, volumes, times, masses, speeds, temperatures, money in dollars and
    cents and the usual units of physics are compared with their units, others without; `5 up` is not `5 down`. A reply
    that repeats an expression of the prompt, such as `17*23`, `x+2=5` or an amount to be converted, is wrong, unless
    the answer is written so or stands in the prompt too. Needs the `math` extra. A comparison that takes more than 5
    seconds of processor time, or fails, is wrong and counted as `unjudged`. It has the common options only."""

    name: Literal["math"] = "math"
    _pool: VerifierPool = PrivateAttr(default_factory=lambda: VerifierPool("math"))

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"verifier math: needs the math extra; run: {installs('math')}")

    def gold(self, value: Any) -> str:
        return gold_latex(value, self.answer)

    def first_unread(self, rows: Iterable[Row], *, seconds: float = ANSWERS_SECONDS) -> tuple[int, str] | None:
        answers: dict[str, tuple[int, str]] = {}
        for index, row in enumerate(rows):
            latex = self.expected(row)
            if not _READABLE.fullmatch(latex):
                answers.setdefault(latex, (index, described(row[self.answer])))
            if len(answers) >= MOST_ANSWERS_READ:
                break
        until, waiting = time.monotonic() + seconds, list(answers.items())
        for start in range(0, len(waiting), ANSWERS_AT_ONCE):
            if time.monotonic() > until:
                break
            batch = waiting[start : start + ANSWERS_AT_ONCE]
            for (_, (index, shown)), read in zip(batch, self._read([latex for latex, _ in batch]), strict=True):
                if not read:
                    return index, _no_expression(self.answer, shown)
        return None

    def _read(self, answers: list[str]) -> list[bool]:
        """Whether math-verify finds an expression in each answer. One that takes too long or fails has none."""
        try:
            read: list[bool] = self._pool.score({"answers": answers})
            return read
        except (VerifierTimeout, VerifierError):
            return [self._read([answer])[0] for answer in answers] if len(answers) > 1 else [False]

    def best_constant(self, rows: Sequence[Row]) -> BestConstant | None:
        """Counts answers that are written alike: comparing every answer with every other takes too long."""
        golds = [self.expected(row) for row in rows]
        if not golds:
            return None
        latex, count = Counter(golds).most_common(1)[0]
        mean = (self.right * count + self.wrong * (len(golds) - count)) / len(golds)
        return BestConstant(reply=shortened(self.enclose(latex)), reward=mean, prompts=len(golds))

    def judge(self, text: str | None, row: Row) -> Score:
        expected, same, unjudged = self.expected(row), False, False
        try:
            if text is not None:
                same = self._pool.score({"reply": text, "expected": expected})
        except (VerifierTimeout, VerifierError) as error:
            log.warning("math-verify: %s; the reply counts as wrong", error)
            unjudged = True
        if same is None:
            raise ValueError(_no_expression(self.answer, described(row[self.answer])))
        reward, metrics = self.score_of(same and not repeats_question(text or "", expected, row))
        return reward, {**metrics, "unjudged": float(unjudged)}


class Code(AnyVerifier):
    """Right when the reply's Python code passes every check of its row, in a sandbox without network and files: `tests`
    (Python that runs after the code, a text or a list of texts), `cases` (a list of `{"stdin": …, "stdout": …}`) or
    `files` (a project with tests in files `test*.py`; the reply is the text of the row's `file`, `solution.py` by
    default). The code is the last fenced block of Python in the reply, or else the last one without a language, or else
    the whole reply. It has the standard library. Metrics: `right`, `passed` (the share of checks), `timed_out`. See
    [code](environments.md#code)."""

    name: Literal["sandbox"] = "sandbox"
    right: float = 1.0
    """Reward of code that passes every check."""
    wrong: float = 0.0
    """Reward of any other reply."""
    partial: bool = False
    """Other replies earn the share of checks that they pass, between `wrong` and `right`."""
    seconds: float = Field(2.0, gt=0, le=60)
    """Processor time of one run. By the clock it may take five times as long, and a second."""
    memory_mb: int = Field(256, ge=16, le=4096)
    """Memory of one run, in addition to an idle interpreter's."""
    output_kb: int = Field(64, ge=1, le=4096)
    """Standard output of one run, and standard error; code that writes more is ended."""
    _sandbox: Sandbox = PrivateAttr(default_factory=Sandbox)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self._sandbox.require()

    def check(self, row: Row) -> None:
        task_of(row)

    def judge(self, text: str | None, row: Row) -> Score:
        task = task_of(row)
        if text is None:
            return self.wrong, {"right": 0.0, "passed": 0.0, "timed_out": 0.0}
        limits = ProgramLimits(self.seconds, self.memory_mb << 20, self.output_kb << 10)
        found = code_score(self._sandbox, limits, code_of(text), task)
        metrics = {"right": float(found.right), "passed": found.passed, "timed_out": float(found.timed_out)}
        if found.right:
            return self.right, metrics
        return self.wrong + (self.right - self.wrong) * (found.passed if self.partial else 0.0), metrics


_ENDS_WITH_NUMBER = re.compile(r"[:\n][\s*_(\[]{0,8}[0-9]+(?:[.,][0-9]+)?[\s*_)\].!]{0,8}\Z")
"""The end of an answer whose last number stands before an earlier score: other text after a score explains it."""

_NAMED_SCORE = re.compile(
    r"(?:\A[\s*_#>]{0,8}|(?:\A|(?<=[\n.!?]))[\s*_#>-]{0,8}(?:(?:my|the|final|overall|total) ){0,2}"
    r"(?:score|rating|grade|mark)[\s*_]{0,4}(?P<named>:|=|is\b)[\s*_(\[]{0,8})"
    r"\d+(?:[.,]\d+)?[*_)\]]{0,4}"
    r"(?=\s*\n|\s*\((?!\s*(?:out )?of)|\s+(?:because|since)\b|(?(named)(?:[.,;]\s|\s*[-–—]+\s+[^\W\d])|(?!)))",
    re.IGNORECASE,
)
"""A number that begins the answer, or is named as the score, before text that explains it."""

_SCORES = ("score", "rating", "grade", "mark")
"""Fields of a judge's answer in JSON that hold the score; the first one alone where it is there."""


def _scores_of(answer: Mapping[str, Any]) -> list[Any]:
    """The values that may be the score in a judge's answer."""
    values = [(name.lower(), one) for name, several in answer.items() for one in several]
    first = [value for name, value in values if name == _SCORES[0]]
    return first or [value for name, value in values if name in _SCORES]


def _all_values(pairs: list[tuple[str, Any]]) -> dict[str, list[Any]]:
    """``object_pairs_hook`` that keeps each value of a field which is given twice."""
    fields: dict[str, list[Any]] = {}
    for name, value in pairs:
        fields.setdefault(name, []).append(value)
    return fields


_FIELD = re.compile(r"\{(\w+)\}")


class Judge(AnyVerifier):
    """Another policy of the job reads the conversation with a question about the reply, and its answer is the reward:
    the field `score` of a JSON object in it, or else its field `rating`, `grade` or `mark` (of several that differ, or
    are no number, none is), else its last score as `8/10` or as `Score: 8` before an explanation, unless a number after
    a colon or alone on a line ends the answer, else the last number in it, divided by `scale`. An answer whose number
    is not from 0 to `scale`, or without one, is 0 and counts in the metric `unjudged`; so does an answer that
    `max_tokens` ended, unless it has such a score, and a reply that leaves a judging policy no room in its context or
    no turn. A frozen policy judges alike for the whole job: `policies: {main: {}, judge: {train: false, base: true}}`.
    """

    name: Literal["judge"] = "judge"
    policy: Name | None = None
    """Which policy of the job judges. Give this or `model`."""
    model: Name | None = None
    """Which model outside of the job judges: a name that the administrator gave in `ROOKERY_JUDGES`. It reads the same
    conversation by OpenAI's chat API, at temperature 0."""
    prompt: Line = "How good is the last reply? Answer with one number from 0 to 10 and nothing else."
    """The question, a user's message. `{field}` stands for the text of that field of the row, nothing where the row
    lacks it; a field that no row has is refused. `{ field }` stands for itself."""
    scale: float = Field(10.0, gt=0)
    """The number of a perfect reply."""
    _cut: bool = PrivateAttr(False)

    def reading(self, finish: str) -> Judge:
        """This verifier for an answer that ended for this reason: ``length`` where it was cut."""
        verifier = self.model_copy()
        verifier._cut = finish == "length"
        return verifier

    @model_validator(mode="after")
    def _one_judge(self) -> Judge:
        if (self.policy is None) == (self.model is None):
            raise ValueError("exactly one of policy (of the job) and model (a name of the administrator)")
        return self

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.model is not None:
            require_judge(self.model)

    def may_read(self, name: str) -> bool:
        return name in _FIELD.findall(self.prompt)

    def question(self, row: Row) -> str:
        """The question to the judge about a reply to ``row``."""
        return _FIELD.sub(lambda found: _as_text(row.get(found[1])), self.prompt)

    def check(self, row: Row) -> None:
        pass

    def first_unfit(self, rows: Iterable[Row]) -> tuple[int, str] | None:
        """The first row and the field of the question that no row has."""
        missing, first = dict.fromkeys(_FIELD.findall(self.prompt)), None
        for row in rows:
            first = row if first is None else first
            missing = {name: None for name in missing if row.get(name) is None}
            if not missing:
                return None
        if first is None or not missing:
            return None
        (name, *_), has = missing, ", ".join(repr(str(field)) for field in first)
        return 0, (
            f"no row has the field {name} that the prompt names, this one has {has}; correct the name, or write"
            f" {{ {name} }} for the text itself"
        )

    def judge(self, text: str | None, row: Row) -> Score:
        number = self._number(text or "")
        if number is None or not 0 <= number <= self.scale:
            return 0.0, {"unjudged": 1.0}
        return min(1.0, float(number / Decimal(self.scale))), {"unjudged": 0.0}

    def _number(self, text: str) -> Decimal | None:
        """The score in an answer; None where there is none, or it is not readable."""
        decoder = json_module.JSONDecoder(object_pairs_hook=_all_values)
        stated = [self._stated(answer) for answer, _, _ in objects(text, decoder, OBJECTS_TRIED) if _scores_of(answer)]
        if stated:  # one of several may be quoted from the reply
            return stated[0] if len(set(stated)) == 1 else None
        return self._written(text)

    def _stated(self, answer: Mapping[str, Any]) -> Decimal | None:
        """The score in a JSON object that has one."""
        given, *others = _scores_of(answer)
        if others:
            return None
        if not isinstance(given, str):
            return decimal_of(given)
        number = plain_number(given)
        return self._written(given) if number is None else number

    def _written(self, text: str) -> Decimal | None:
        """The score in prose."""
        scale = re.escape(f"{Decimal(repr(self.scale)).normalize():f}") + r"(?:\.0+)?"
        between = r"(?:\(?(?:/|of)|(?:[A-Za-z]{1,12}[*_\s]{1,4})?\(?out of)"
        scored = rf"(\d)[*_)\]\s]{{0,8}}{between}[*_\s]{{0,8}}{scale}(?![.,]?\d)"  # 8/10, 8 points out of 10
        text = re.sub(scored, "\\1\0\n", text.replace("\0", " "))
        text, found, rest = _NAMED_SCORE.sub("\\g<0>\0\n", text).rpartition("\0")
        if self._cut and not found:
            return None
        if not self._cut and (not found or _ENDS_WITH_NUMBER.search(rest)):
            text += rest
        return next(numbers(text.replace("\0", ""), backwards=True), None)


class Grader(AnyVerifier):
    """One of OpenAI's graders: `string_check`, `text_similarity`, `python`, `score_model`, `label_model`, or `multi`
    over these, as OpenAI's fine-tuning API has them ([graders](fine-tuning.md#graders)). Metrics: `grader`, for `multi`
    one for each of its parts, and `unjudged`, the share of replies for which Python, a model or the formula gave no
    value: they earn 0, or less where the formula of `multi` gives less with 0 in that place."""

    name: Literal["grader"] = "grader"
    grader: AnyGrader
    """The grader, by its `type`."""
    _sandbox: Sandbox = PrivateAttr(default_factory=Sandbox)
    _ask: Ask | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _templates(self) -> Grader:
        check_templates(self.grader)
        if not reads_reply(self.grader):
            raise ValueError(
                "the grader reads nothing of the reply, so every reply would earn the same; name"
                " {{ sample.output_text }}, or {{ sample.output_json.FIELD }}, in one of its texts"
            )
        return self

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self._sources():
            self._sandbox.require()

    def may_read(self, name: str) -> bool:
        """Python gets the whole row."""
        named = [path for template in self.grader.templates() for path in paths(template)]
        return bool(self._sources()) or any(path[:2] == ["item", name] for path in named)

    def _sources(self) -> list[str]:
        return [one.source for one in single(self.grader) if isinstance(one, PythonGrader)]

    def asking(self, ask: Ask | None) -> Grader:
        """This verifier, with models that are asked by ``ask``."""
        verifier = self.model_copy()
        verifier._ask = ask
        return verifier

    def check_options(self) -> None:
        for source in self._sources():
            try:
                check_source(source)
            except ValueError as error:
                raise UserError(f"environment.verifier.grader: {error}") from None

    def judge(self, text: str | None, row: Row) -> Score:
        graded = grade(self.grader, text, item_of(row), GraderTools(self._sandbox, self._ask))
        metrics = {"grader": graded.value, **graded.parts}
        return graded.value, {**metrics, "unjudged": float(bool(graded.error))}

    def check(self, row: Row) -> None:
        check_item(self.grader, item_of(row))


VERIFIERS: dict[str, type[AnyVerifier]] = {
    "exact": Exact,
    "number": Number,
    "regex": Regex,
    "json": Json,
    "math": Math,
    "sandbox": Code,
    "judge": Judge,
    "grader": Grader,
}
"""Verifiers by name; a job gives a name, or a mapping with ``name`` and options."""

Verifier = Exact | Number | Regex | Json | Math | Code | Judge | Grader


def _as_text(value: Any) -> str:
    """A field of a row in a text, as in the templates of graders."""
    return "" if value is None else value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)


def _key(gold: str | Decimal) -> str | Decimal:
    return gold if isinstance(gold, Decimal) else visible(gold)


def _reads_as(text: str, expected: str | Decimal, ignore_case: bool = False) -> bool:
    """Whether a text equals an answer of :func:`text_or_number`."""
    if isinstance(expected, Decimal):
        return plain_number(text) == expected
    read = folded if ignore_case else visible
    return read(text) == read(expected)


def _within(given: Decimal, expected: Decimal, tolerance: float) -> bool:
    return _EXACT.abs(_EXACT.subtract(given, expected)) <= Decimal(repr(tolerance))


def _same(given: Any, expected: Any, tolerance: float) -> bool:
    """Equal as JSON: 5 and 5.0 are, 1 and true are not, nor are 5 and "5"; texts when they read the same."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    number, other = decimal_of(given), decimal_of(expected)
    if number is not None and other is not None:
        return given == expected or _within(number, other, tolerance)
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(lambda a, b: _same(a, b, tolerance), given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_same(given[key], expected[key], tolerance) for key in given)
    if isinstance(given, str) and isinstance(expected, str):
        return visible(given) == visible(expected)
    return type(given) is type(expected) and given == expected


def _no_expression(field: str, shown: str) -> str:
    return f"{field} is {shown}, in which math-verify finds no expression; write it in LaTeX, such as \\frac{{1}}{{2}}"


def _first_object(text: str, strict: bool) -> dict[str, Any] | None:
    """The first JSON object in a text; with ``strict`` the text is the object and nothing else."""
    decoder = json_module.JSONDecoder(object_pairs_hook=unique_fields, parse_float=_finite, parse_constant=no_constant)
    if not strict:
        return next((found for found, _, _ in objects(text, decoder, OBJECTS_TRIED)), None)
    try:
        whole = decoder.decode(text.strip())
    except (ValueError, RecursionError):
        return None
    return whole if isinstance(whole, dict) else None


def _finite(digits: str) -> float:
    """Raises ValueError for a number beyond floats, of which Python makes an infinity."""
    number = float(digits)
    if math_module.isinf(number):
        raise ValueError(f"{digits} is too large")
    return number


def no_constant(name: str) -> NoReturn:
    """``parse_constant`` hook that refuses NaN and Infinity, which JSON does not have. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")
