"""The demo and the examples: valid jobs, an honest comparison, and the README's snippet with another model."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.support.datasets import read_jsonl
from tests.support.faces import MODEL, Reach, ThreadedWorker, served

from rookery.cli.demo import HELD_OUT, Task, compare, view_of
from rookery.client import Client, Job, Record
from rookery.client.connection import record
from rookery.environments.builtins import find
from rookery.errors import Unavailable
from rookery.examples import contacts, phone_book, shopping, slow_clerk
from rookery.spec.files import read_job
from rookery.spec.parsing import parse_job

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = [contacts.TASK, phone_book.TASK, shopping.TASK, slow_clerk.TASK]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_task_is_a_valid_job_whose_best_constant_reply_earns_little(task: Task) -> None:
    if isinstance(task.environment, dict):
        parse_job({**task.spec(), "environment": task.environment})
        find("jsonl").validate_options({name: value for name, value in task.environment.items() if name != "id"})
        prompts: list[Any] = task.environment["rows"][-HELD_OUT:]
    else:
        parse_job({**task.spec(), "environment": {"hosted": task.name}})
        prompts = list(task.environment.prompts("eval"))[:HELD_OUT]
    assert len(prompts) == HELD_OUT and 0 < task.best_constant(prompts) < 0.4


def evaluation(rewards: list[float]) -> Record:
    held_out = [{"prompt": ["Maria", "Paris"], "reward": reward, "answer": "", "error": ""} for reward in rewards]
    found: Record = record({"held_out": held_out})
    return found


@pytest.mark.parametrize(
    ("before", "after", "learned"),
    [
        ([0.0, 0.1, 0.0, 0.1], [1.0, 1.1, 1.1, 1.0], True),
        ([0.0, 0.1, 0.0, 0.1], [0.9, 0.9, 0.9, 0.9], False),  # not above the best constant reply, which is 1 here
        ([1.1, 1.2, 1.1, 1.2], [1.2, 1.1, 1.2, 1.1], False),  # no gain
        ([0.0, 2.0, 0.0, 2.0], [2.0, 0.5, 2.0, 0.5], False),  # less than two standard errors
    ],
)
def test_task_is_learned_if_the_gain_is_significant_and_above_the_best_constant_reply(
    before: list[float], after: list[float], learned: bool
) -> None:
    found = compare(slow_clerk.TASK, [evaluation(before), evaluation(after)])
    assert found is not None and found.learned is learned


def test_evaluations_whose_episodes_failed_are_not_compared() -> None:
    last = evaluation([1.0, 1.0])
    for result in last.held_out[:1]:
        result["error"] = "the environment is away"
    assert compare(slow_clerk.TASK, [evaluation([0.0, 0.0]), last]) is None


def test_demo_waits_for_a_service_that_is_silent_for_a_while() -> None:
    class SilentJob(Job):
        asked = 0

        def __init__(self) -> None:
            pass

        def show(self) -> Record:
            self.asked += 1
            if self.asked < 3:
                raise Unavailable("did not answer within 10 s")
            shown: Record = record({"state": "running"})
            return shown

    assert view_of(SilentJob(), pause=0.0).state == "running"
    with pytest.raises(Unavailable):
        view_of(SilentJob(), patience=-1.0)


def test_a_task_of_the_user_runs_as_written(tmp_path: Path, reach: Reach, capsys: pytest.CaptureFixture[str]) -> None:
    source = (EXAMPLES / "own_task.py").read_text(encoding="utf-8")
    script = tmp_path / "own_task.py"
    script.write_text(source.replace("smollm2-135m-instruct", MODEL))
    with served(tmp_path) as service:
        reach(service)
        with ThreadedWorker.of(service):
            runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:24]] == [str(step) for step in range(1, 25)]
    assert lines[-3].startswith("version 0: ") and lines[-2].startswith("version 24: ")
    assert (tmp_path / "adder" / "adapter_config.json").exists()


def test_sums_example_is_a_valid_job(tmp_path: Path) -> None:
    job = {**read_job(EXAMPLES / "sums.yaml"), "base_model": MODEL}
    assert len(read_jsonl((EXAMPLES / "sums.jsonl").read_bytes())) == 361
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        plan = client.dry_run(job, folder=EXAMPLES)
    assert plan.prompts[0].messages[0].content == "2 + 3 ="
