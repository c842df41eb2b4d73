"""Runs the class for verifiers 0.1 that docs/environments.md shows, with that library: the page, folders of modules."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path += sys.argv[2:]

import verifiers as vf
from datasets import Dataset

import rookery
from rookery.environments.base import Reply


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def known(info: dict[str, Any], prompt: Any) -> float:
    return float(info["known"] and prompt[0].role == "system")


async def half() -> float:
    return 0.5


def main() -> None:
    [shown] = [
        text for text in re.findall("```python\n(.*?)```", Path(sys.argv[1]).read_text(), re.S) if "class Old" in text
    ]
    names: dict[str, Any] = {"rookery": rookery, "vf": vf}
    exec(shown, names)
    rubric = vf.Rubric(funcs=[right, known, half], weights=[1.0, 1.0, 0.5])
    rows = Dataset.from_list([{"question": "1+1?", "answer": "2", "info": '{"known": true}'}] * 3)
    made = names["Old"](vf.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="Be short."))
    episode = made.for_episode()
    episode.prompt, *_ = made.prompts("train")
    first = episode.reset(episode.prompt, 0)
    step = asyncio.run(episode.step(Reply("2", [], first, 0)))
    print(json.dumps({"first": first, "reward": step.reward, "metrics": step.metrics, "done": step.done}))


if __name__ == "__main__":
    main()
