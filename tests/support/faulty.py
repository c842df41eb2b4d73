"""Environments that misbehave, one way each, for tests that need trouble. They all ask the same small question, so the
well-behaved one (:class:`Good`) shows what the others would have done."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Iterable
from typing import Any

import rookery.environments.base as base


class Good(base.Environment):
    """One turn; the reward is 1 when the reply is the prompt's number, and 0 otherwise."""

    deterministic = True

    def __init__(self, prompts: int = 8) -> None:
        self.count = prompts

    def prompts(self, split: base.Split) -> Iterable[Any]:
        return [{"number": number} for number in range(self.count)]

    def reset(self, prompt: Any, seed: int) -> Any:
        return [{"role": "user", "content": f"Say {prompt['number']}."}]

    def step(self, reply: base.Reply) -> Any:
        return base.Step(reward=float(reply.text.strip() == str(self.prompt["number"])), done=True)


class RaisesInReset(Good):
    def reset(self, prompt: Any, seed: int) -> Any:
        raise RuntimeError("no beginning")


class RaisesInStep(Good):
    def step(self, reply: base.Reply) -> Any:
        raise RuntimeError("no step")


class Exits(Good):
    """As code does that a policy wrote and an environment runs."""

    def step(self, reply: base.Reply) -> Any:
        raise SystemExit(3)


class ExitsAsync(Good):
    async def step(self, reply: base.Reply) -> Any:
        raise SystemExit(3)


class RaisesInPrompts(Good):
    def prompts(self, split: base.Split) -> Iterable[Any]:
        yield {"number": 0}
        raise RuntimeError("no prompts")


class NotANumber(Good):
    def step(self, reply: base.Reply) -> Any:
        return base.Step(reward=float("nan"), done=True, metrics={"share": float("nan")})


class Together(Good):
    """Its episodes share what it holds, and nothing with another object of the class."""

    def for_episode(self) -> base.Environment:
        return copy.copy(self)


class Stuck(Together):
    """``step`` does not return before ``release`` is set; ``entered`` counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.entered = threading.Semaphore(0)

    def step(self, reply: base.Reply) -> Any:
        self.entered.release()
        self.release.wait()
        return super().step(reply)


class Slow(Good):
    """Answers ``seconds`` late, holding a thread."""

    def __init__(self, seconds: float = 1.0, prompts: int = 8) -> None:
        super().__init__(prompts)
        self.seconds = seconds

    def step(self, reply: base.Reply) -> Any:
        time.sleep(self.seconds)
        return super().step(reply)


class SlowAsync(Slow):
    """Answers ``seconds`` late, holding nothing."""

    async def step(self, reply: base.Reply) -> Any:
        await asyncio.sleep(self.seconds)
        return Good.step(self, reply)


class WrongAnswers(Good):
    """Returns what no host can use: ``which`` says what."""

    def __init__(self, which: str = "messages", prompts: int = 8) -> None:
        super().__init__(prompts)
        self.which = which

    def reset(self, prompt: Any, seed: int) -> Any:
        replies = {"text": "hello", "none": None, "messages": [{"role": "user"}], "empty": []}
        return replies.get(self.which, super().reset(prompt, seed))

    def step(self, reply: base.Reply) -> Any:
        if self.which == "reward":
            return base.Step(reward="much", done=True)  # type: ignore[arg-type]
        if self.which == "surrogate":
            return base.Step(messages=[{"role": "user", "content": "\ud800"}])
        return 1.0 if self.which == "step" else super().step(reply)


class Counting(Together):
    """Not deterministic: three turns, and every answer's number is its place among all that were given."""

    deterministic = False

    def __init__(self) -> None:
        super().__init__()
        self.answered: list[str] = []

    def step(self, reply: base.Reply) -> Any:
        self.answered.append(reply.text)
        message = {"role": "user", "content": f"Step {len(self.answered)}."}
        return base.Step(messages=[message], reward=1.0, done=reply.turn >= 2)
