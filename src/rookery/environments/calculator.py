"""The built-in ``calculator``: a two-turn task with a tool.

The policy writes ``CALC(expression)``, reads the result, and answers with it. The answer is rewarded only after the
calculator gave it, so guessing earns nothing. Train and eval sums are disjoint.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rookery.bounds import GivenModel, Integer, Text
from rookery.environments.base import Environment, Message, Reply, Split, SplitSizes, Step
from rookery.environments.verifiers.parts import spoken
from rookery.environments.verifiers.verifiers import Number

_CALL = "CALC("
LONGEST_EXPRESSION = 100
"""Characters of a call's expression."""
_ANSWER = Number.model_validate({"where": "only"})
_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class CalculatorOptions(GivenModel):
    """Options of ``{id: calculator}``: two turns with a tool. The policy writes `CALC(expression)`, reads the result,
    and answers with it; a guessed answer earns nothing. Train and eval sums are disjoint. The three rewards add up."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    operations: tuple[Literal["+", "-", "*"], ...] = Field(("+", "*"), min_length=1, max_length=100)
    """Operations that sums are drawn from."""
    low: int = Field(11, ge=0, le=10**9)
    """Smallest operand."""
    high: int = Field(99, ge=1, le=10**9)
    """Largest operand, at least `low`."""
    prompts: int = Field(512, ge=1, le=100_000)
    """Number of training sums."""
    eval_prompts: int = Field(64, ge=0, le=100_000)
    """Number of held-out sums."""
    seed: Integer = 0
    """Draws the sums."""
    instruction: Text = (
        "You have a calculator. To use it, reply with CALC and the expression in brackets, and nothing else.\n"
        "What is {expression}?"
    )
    """First message; contains `{expression}`."""
    result: Text = "The calculator says {result}. Reply with that number only."
    """Message after the call; contains `{result}`."""
    tool_role: Literal["user", "tool"] = "user"
    """Role of that message; many chat templates have no `tool`."""
    called: float = 0.2
    """Reward of a first call that the calculator understands."""
    asked: float = 0.3
    """Further reward if the call computes the asked sum."""
    answered: float = 0.5
    """Further reward for answering with its result."""

    @field_validator("instruction", "result")
    @classmethod
    def _placeholder(cls, value: str, info: Any) -> str:
        name = "expression" if info.field_name == "instruction" else "result"
        if "{" + name + "}" not in value:
            raise ValueError(f"a text that contains {{{name}}}")
        return value

    @model_validator(mode="after")
    def _enough_sums(self) -> CalculatorOptions:
        if self.low > self.high:
            raise ValueError("low is at most high")
        there = len(set(self.operations)) * (self.high - self.low + 1) ** 2
        if self.prompts + self.eval_prompts > there:
            raise ValueError(f"prompts + eval_prompts is at most {there}, the sums that there are")
        return self


class Calculator(Environment):
    """Turn 0: the call. Turn 1: the answer."""

    deterministic = True

    def __init__(self, options: CalculatorOptions) -> None:
        self._options = options

    def sizes(self) -> SplitSizes:
        """The sizes of the splits, which are disjoint."""
        return SplitSizes(self._options.prompts, self._options.eval_prompts, held_out_by="environment.eval_prompts")

    def prompts(self, split: Split) -> Iterable[Any]:
        options = self._options
        operations = list(dict.fromkeys(options.operations))
        width = options.high - options.low + 1
        count = options.prompts + options.eval_prompts
        drawn = []
        for number in Random(f"calculator:{options.seed}").sample(range(len(operations) * width * width), count):
            which, pair = divmod(number, width * width)
            left, right = (options.low + part for part in divmod(pair, width))
            expression = f"{left} {operations[which]} {right}"
            drawn.append({"expression": expression, "answer": calculate(expression)})
        return drawn[options.eval_prompts :] if split == "train" else drawn[: options.eval_prompts]

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        text = self._options.instruction.replace("{expression}", prompt["expression"])
        return [{"role": "user", "content": text}]

    def step(self, reply: Reply) -> Step:
        text = spoken(reply.text, reply.raw, reply.special) or ""
        if reply.turn > 0:
            return self._judge_answer(text)
        call = _called(text)
        try:
            result = calculate(call) if call is not None else None
        except ValueError:
            result = None
        if result is None:
            return Step(done=True, metrics={"called": 0.0, "asked": 0.0, "right": 0.0})
        asked = result == self.prompt["answer"]
        content = self._options.result.replace("{result}", str(result))
        return Step(
            messages=[{"role": self._options.tool_role, "content": content}],
            reward=self._options.called + self._options.asked * asked,
            # a call that computes something else cannot lead to the answer
            done=not asked,
            metrics={"called": 1.0, "asked": float(asked), "right": 0.0},
        )

    def _judge_answer(self, text: str) -> Step:
        _, metrics = _ANSWER.score(text, self.prompt)
        return Step(reward=self._options.answered * metrics["right"], done=True, metrics={"right": metrics["right"]})

    def for_episode(self) -> Environment:
        return copy.copy(self)


def _called(text: str) -> str | None:
    """The expression of the first call, up to the bracket that closes it; None where nothing is called."""
    _, _, rest = text.partition(_CALL)
    depth = 1
    for position, char in enumerate(rest[: LONGEST_EXPRESSION + 1]):
        depth += (char == "(") - (char == ")")
        if not depth:
            return rest[:position]
    return None


def calculate(expression: str) -> int | float:
    """The value of numbers joined by ``+ - * /`` and brackets. Raises ValueError for anything else."""
    try:
        value = _value(ast.parse(expression.strip().replace("×", "*"), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r}: {error}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{expression!r}: the result is too large")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only numbers, + - * / and brackets")
