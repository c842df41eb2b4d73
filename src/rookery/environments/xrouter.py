"""The built-in ``xrouter``: route each question to one of several models that differ in accuracy and price.

The models are simulated: a model is its accuracy by difficulty and its price per call, and its answers are drawn from
the episode's seed. The policy calls models as tools, ``call_low(...)``, and ends with ``select_response(call_1)`` or
with its own answer. A wrong answer earns nothing however cheap it was; a right one earns ``success`` less its
weighed cost. The task is that of xRouter (arXiv 2510.08439).
"""

from __future__ import annotations

import copy
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from rookery.bounds import MODEL_NAME, GivenModel, Integer, Text
from rookery.environments.base import Environment, Message, Reply, Split, SplitSizes, Step
from rookery.environments.verifiers.parts import spoken
from rookery.environments.verifiers.verifiers import Number
from rookery.protocol import BestConstant

Difficulty = Literal["easy", "medium", "hard"]
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")

MOST_CALLS = 8
"""Calls in one reply. A reply with more is invalid: no router needs them, and each is an answer in the next prompt."""

OPERANDS: dict[Difficulty, tuple[str, range, range]] = {
    "easy": ("+", range(100, 1000), range(100, 1000)),
    "medium": ("*", range(11, 100), range(11, 100)),
    "hard": ("**", range(11, 100), range(3, 9)),
}
"""Of each difficulty the operation and its operands. Their results are out of reach of a small policy, so an answer
without a call is hardly ever right, and the value of the best route is known."""

GUESS, NO_CALL = "0", 0.0
"""A reply that is wrong for every question, and its reward: it costs nothing."""

_CALL = re.compile(r"\bcall_([a-z][a-z0-9]{0,30})\(([^()]{0,2000})\)")
_SELECT = re.compile(r"\bselect_response\(\s*call_([0-9]{1,3})\s*\)")
_TOOL = re.compile(r"\b(?:call_\w*|select_response)\s*\(")
_ANSWER = Number.model_validate({"where": "only"})

Share = Annotated[float, Field(ge=0, le=1)]
ModelName = Annotated[str, Field(pattern=MODEL_NAME, max_length=31)]


class SimulatedModel(GivenModel):
    """A model that the router can call."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    price: float = Field(ge=0, le=1e6)
    """Cost of one call."""
    accuracy: tuple[Share, Share, Share]
    """Share of right answers to easy, medium and hard questions."""


def _default_models() -> dict[str, SimulatedModel]:
    return {
        "low": SimulatedModel(price=0.01, accuracy=(0.92, 0.30, 0.05)),
        "mid": SimulatedModel(price=0.08, accuracy=(0.93, 0.92, 0.35)),
        "top": SimulatedModel(price=0.25, accuracy=(0.95, 0.95, 0.95)),
    }


class XRouterOptions(GivenModel):
    """Options of ``{id: xrouter}``: questions of three difficulties, and simulated models that differ in accuracy and
    price. The policy writes `call_NAME(...)`, and answers with `select_response(call_1)` or with a number. The reward
    of a right answer is `success` − min(`cost_weight` · cost, `cost_cap`), of a wrong or missing one 0; the cost is the
    sum over all calls."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    models: dict[ModelName, SimulatedModel] = Field(default_factory=_default_models, min_length=1, max_length=20)
    """The models by name: `{price: 0.08, accuracy: [0.93, 0.92, 0.35]}`, the accuracy of easy, medium and hard
    questions. By default `low`, `mid` and `top` at 0.01, 0.08 and 0.25."""
    pool: int | None = Field(None, ge=1, le=20)
    """Each prompt offers so many of the models, drawn at random; all of them when absent."""
    answer: Literal["select", "last"] = "select"
    """`select`: the policy reads the responses and selects one, or calls again. `last`: a reply with calls ends the
    episode, and the response to its last call is the answer."""
    turns: int = Field(3, ge=1, le=3)
    """Replies of an episode at most. The last one has to answer."""
    cost_weight: float = Field(2.0, ge=0, le=1e6)
    """Weight of the cost, λ."""
    cost_cap: float = Field(0.8, ge=0, le=1e6)
    """The most that the cost takes away, at most `success`."""
    success: float = Field(1.0, gt=0, le=1e6)
    """Reward of a right answer that cost nothing."""
    gate: bool = True
    """False takes `cost_weight` · cost away from every answer, wrong ones too, and without the cap. Then the cheapest
    way to be wrong may win: for comparison."""
    prompts: int = Field(512, ge=1, le=100_000)
    """Number of training questions."""
    eval_prompts: int = Field(96, ge=0, le=100_000)
    """Number of held-out questions; those of each split have all difficulties in turn."""
    seed: Integer = 0
    """Draws the questions and the pools."""
    instruction: Text = "Models: {models}. {question} ="
    """Last message of the prompt; contains `{question}`. `{models}` becomes the names and prices of the pool,
    `{names}` the names alone."""
    system: Text = ""
    """The system message; when empty, the one that the chat template may have."""
    examples: tuple[tuple[Text, Text], ...] = Field((), max_length=16)
    """Pairs of a user's message and a reply that come before it, to show a small model the form."""

    @model_validator(mode="after")
    def _consistent(self) -> XRouterOptions:
        if "{question}" not in self.instruction:
            raise ValueError("instruction contains {question}")
        if self.pool is not None and self.pool > len(self.models):
            raise ValueError(f"pool is at most {len(self.models)}, the number of models")
        if self.answer == "select" and self.turns < 2:
            raise ValueError("turns is at least 2 where answer is select: a call comes before the reply that selects")
        if self.cost_cap > self.success:
            raise ValueError("cost_cap is at most success, so that no right answer earns less than a wrong one")
        there = min(len(left) * len(right) for _, left, right in OPERANDS.values())
        if -(-(self.prompts + self.eval_prompts) // len(DIFFICULTIES)) > there:
            raise ValueError(f"prompts + eval_prompts is at most {there * len(DIFFICULTIES)}")
        return self

    def reward(self, right: float, cost: float) -> float:
        """The reward of an answer that is right with probability ``right`` and cost ``cost``."""
        taken = self.cost_weight * cost
        return right * (self.success - min(taken, self.cost_cap)) if self.gate else right * self.success - taken


class XRouter(Environment):
    """Each reply calls models or ends the episode with one answer."""

    deterministic = True

    def __init__(self, options: XRouterOptions) -> None:
        self._options = options

    def sizes(self) -> SplitSizes:
        """The sizes of the splits, which are disjoint."""
        return SplitSizes(self._options.prompts, self._options.eval_prompts, held_out_by="environment.eval_prompts")

    def prompts(self, split: Split) -> Iterable[Any]:
        options = self._options
        draw = Random(f"xrouter:{options.seed}")
        each = -(-(options.prompts + options.eval_prompts) // len(DIFFICULTIES))
        by_difficulty = [_questions(difficulty, each, draw) for difficulty in DIFFICULTIES]
        questions = [question for three in zip(*by_difficulty, strict=True) for question in three]
        names = list(options.models)
        for question in questions:
            pool = set(draw.sample(names, options.pool or len(names)))
            question["pool"] = [name for name in names if name in pool]
        end = options.eval_prompts + options.prompts
        return questions[: options.eval_prompts] if split == "eval" else questions[options.eval_prompts : end]

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        options = self._options
        self._responses: list[tuple[str, int]] = []  # the model and the response of each call, in their order
        offered = ", ".join(f"{name} {options.models[name].price:g}" for name in prompt["pool"])
        asked = options.instruction.replace("{models}", offered).replace("{names}", ", ".join(prompt["pool"]))
        shown = [("system", options.system)] if options.system else []
        shown += [pair for example in options.examples for pair in zip(("user", "assistant"), example, strict=True)]
        shown.append(("user", asked.replace("{question}", prompt["question"])))
        return [{"role": role, "content": content} for role, content in shown]

    def step(self, reply: Reply) -> Step:
        text = spoken(reply.text, reply.raw, reply.special)
        if text is None:
            return self._invalid()
        calls, selected = _CALL.findall(text), _SELECT.findall(text)
        if len(_TOOL.findall(text)) > len(calls) + len(selected):
            return self._invalid()  # a tool that does not exist, or a call without its end
        if not calls and not selected:
            _, metrics = _ANSWER.score(text, {"answer": self.prompt["answer"]})
            return self._answered(bool(metrics["right"]), metrics["right"])
        if selected:
            number = int(selected[0])
            if calls or len(selected) > 1 or not 1 <= number <= len(self._responses):
                return self._invalid()
            return self._chosen(number - 1)
        if len(calls) > MOST_CALLS or any(name not in self.prompt["pool"] for name, _ in calls):
            return self._invalid()
        for name, _ in calls:
            self._responses.append((name, self._response(name, len(self._responses))))
        if self._options.answer == "last":
            return self._chosen(len(self._responses) - 1)
        if reply.turn + 1 >= self._options.turns:
            return self._invalid()  # it ends with calls, not with an answer
        first = len(self._responses) - len(calls)
        lines = [f"call_{n + 1}: {self._responses[n][1]}" for n in range(first, len(self._responses))]
        return Step(messages=[{"role": "user", "content": "\n".join(lines)}])

    def best_constant(self, prompts: Sequence[Any]) -> BestConstant | None:
        """With ``answer: last``, the constant call, or wrong answer, that is expected to earn most. A constant reply
        cannot select the response to a call that it does not repeat."""
        if self._options.answer != "last" or not prompts:
            return None
        earned = {f"call_{name}()": reward for name, reward in constant_routes(self._options, prompts).items()}
        earned[GUESS] = NO_CALL
        best = max(earned, key=earned.__getitem__)
        return BestConstant(reply=best, reward=earned[best], prompts=len(prompts))

    def for_episode(self) -> Environment:
        return copy.copy(self)

    def _response(self, name: str, number: int) -> int:
        """The answer of a model to the question. It does not depend on the policy: equal calls of a group's episodes
        get equal responses."""
        draw = Random(f"{self.seed}:{self.prompt['question']}:{name}:{number}")
        accuracy = self._options.models[name].accuracy[DIFFICULTIES.index(self.prompt["difficulty"])]
        answer = int(self.prompt["answer"])
        return answer if draw.random() < accuracy else answer + draw.randint(1, 99) * draw.choice((-1, 1))

    def _chosen(self, index: int) -> Step:
        name, response = self._responses[index]
        accuracy = self._options.models[name].accuracy[DIFFICULTIES.index(self.prompt["difficulty"])]
        return self._answered(response == int(self.prompt["answer"]), accuracy)

    def _answered(self, right: bool, probability: float) -> Step:
        return self._end(self._options.reward(float(right), self._cost()), probability, right=right, valid=True)

    def _invalid(self) -> Step:
        reward = self._options.reward(0.0, self._cost())
        return self._end(reward, 0.0, right=False, valid=False)

    def _end(self, reward: float, probability: float, *, right: bool, valid: bool) -> Step:
        cost = self._cost()
        metrics = {
            "right": float(right),
            "cost": cost,
            "calls": float(len(self._responses)),
            "valid": float(valid),
            "expected": self._options.reward(probability, cost),
        }
        return Step(reward=reward, done=True, metrics=metrics)

    def _cost(self) -> float:
        return sum(self._options.models[name].price for name, _ in self._responses)


def _questions(difficulty: Difficulty, count: int, draw: Random) -> list[dict[str, Any]]:
    operation, left, right = OPERANDS[difficulty]
    found = []
    for number in draw.sample(range(len(left) * len(right)), count):
        one, other = left[number // len(right)], right[number % len(right)]
        answer = {"+": one + other, "*": one * other, "**": one**other}[operation]
        question = f"{one} {operation} {other}"
        found.append({"question": question, "answer": str(answer), "difficulty": difficulty})
    return found


def route_reward(options: XRouterOptions, prompt: Mapping[str, Any], name: str) -> float:
    """The expected reward of one call of a model whose response is the answer; 0 outside of the prompt's pool."""
    if name not in prompt["pool"]:
        return 0.0
    model = options.models[name]
    return options.reward(model.accuracy[DIFFICULTIES.index(prompt["difficulty"])], model.price)


def constant_routes(options: XRouterOptions, prompts: Sequence[Any]) -> dict[str, float]:
    """By model, the expected mean reward of calling it for every question."""
    return {
        name: statistics.fmean(route_reward(options, prompt, name) for prompt in prompts) for name in options.models
    }


def best_route(options: XRouterOptions, prompt: Mapping[str, Any]) -> str:
    """The model of the prompt's pool with the highest expected reward."""
    return str(max(prompt["pool"], key=lambda name: route_reward(options, prompt, name)))


def optimum(options: XRouterOptions, prompts: Sequence[Any]) -> float:
    """The expected mean reward of the best single call for each question, or of none where each loses."""
    best = (route_reward(options, prompt, best_route(options, prompt)) for prompt in prompts)
    return statistics.fmean(max(NO_CALL, reward) for reward in best)


def best_threshold(options: XRouterOptions, prompts: Sequence[Any]) -> float:
    """The expected mean reward of the best rule that calls the cheapest model up to one difficulty and the dearest
    above it. Both are those of the prompt's pool."""

    def earned(first_dear: int, prompt: Mapping[str, Any]) -> float:
        by_price = sorted(prompt["pool"], key=lambda name: options.models[name].price)
        dear = DIFFICULTIES.index(prompt["difficulty"]) >= first_dear
        return route_reward(options, prompt, by_price[-1 if dear else 0])

    return max(statistics.fmean(earned(first, prompt) for prompt in prompts) for first in range(len(DIFFICULTIES) + 1))
