"""Train an agent that you already have: a loop on OpenAI's client with a tool. It needs a running service
(``rookery serve``) and the client: ``pip install 'rookery[agents]'``.

The number is only in the book, so the agent has to ask for it, and then to repeat what it read. On two CPU cores it
takes about five minutes; the mean reward of held-out names rises from 0.58 to 0.86 +/- 0.04.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Any

import rookery
from rookery.examples.words import CITIES, PEOPLE, assistant, user

HELD_OUT = 64

EXAMPLE = [
    user("Number of Hugo?"),
    assistant("lookup(Hugo)"),
    user("lookup(Hugo) = 4071"),
    assistant("4071"),
]


class PhoneBookAgent(rookery.Agent):
    def prompts(self, split: str) -> Iterable[dict[str, str]]:
        draw = random.Random(f"phone book {split}")
        people = PEOPLE if split == "train" else PEOPLE + [city[::-1].title() for city in CITIES]
        return [{"name": draw.choice(people), "number": str(draw.randrange(1000, 10000))} for _ in range(HELD_OUT * 4)]

    async def run(self, task: dict[str, str], llm: rookery.LLM) -> rookery.Outcome:
        messages: list[Any] = [*EXAMPLE, user(f"Number of {task['name']}?")]
        asked = False
        for _ in range(3):
            answer = await llm.client.chat.completions.create(model=llm.model, messages=messages)
            text = (answer.choices[0].message.content or "").strip()
            messages.append(assistant(text))
            call = re.fullmatch(r"lookup\((.*)\)", text)
            if call is None:
                right = asked and text == task["number"]
                return rookery.Outcome(0.5 * asked + 0.5 * right, {"asked": float(asked), "right": float(right)})
            asked = asked or call[1] == task["name"]
            found = task["number"] if call[1] == task["name"] else "not in the book"
            messages.append(user(f"{text} = {found}"))
        return rookery.Outcome(0.5 * asked, {"asked": float(asked), "right": 0.0})


if __name__ == "__main__":
    job = rookery.Client().train(
        base_model="smollm2-135m-instruct",
        environment={"hosted": PhoneBookAgent(), "max_turns": 3},
        policies={"main": {"rank": 16, "optimizer": {"lr": 3e-4}}},
        algorithm={"group_size": 8, "groups_per_step": 6},
        sampling={"max_tokens": 14},
        evaluation={"prompts": HELD_OUT},
        stop={"steps": 10},
    )
    for row in job.metrics():
        print(row.step, row.figure("reward"))
    for row in job.evaluations():  # figure() writes a dash for a number that there is not
        print(f"version {row.version}: {row.figure('mean')} +/- {row.figure('stderr')} on held-out names")
