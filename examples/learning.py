"""Support for the learning tasks: run jobs on a service of their own, and write what was learned.

``results.json`` in the output folder has the curves of every policy on held-out prompts, the counts of episodes and
tokens, the day, the commit and the machine; ``curves.svg`` shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rookery.client import Client, Job, Record
from rookery.environments.base import Environment, Message, Reply, Step
from rookery.errors import RookeryError
from rookery.examples.charts import Line, line_chart
from rookery.settings import Settings

MODEL = "smollm2-135m-instruct"
METRIC = "reward/"
"""Beginning of an environment's metrics in a row."""
SHOWN_SECONDS = 20.0
"""Interval between lines of progress."""

Replier: TypeAlias = Callable[[Sequence[Message], int], str]
"""A scripted policy: the conversation and the number of the reply become a reply."""


Jobs: TypeAlias = Mapping[str, tuple[dict[str, Any] | Environment, dict[str, Any]]]
"""By name: an environment, and further fields of the job."""
After: TypeAlias = Callable[[Client, dict[str, Job]], dict[str, Any]]


@dataclass(frozen=True)
class Game:
    """An episode that scripted policies played."""

    rewards: dict[str, float]
    metrics: dict[str, float]
    messages: list[Message]


def play(environment: Environment, prompt: Any, seed: int, policies: Mapping[str, Replier]) -> Game:
    """Play one episode of an environment with plain methods. The first of ``policies`` replies where the environment
    names none."""
    episode = environment.for_episode()
    episode.prompt, episode.seed = prompt, seed
    opened: Any = episode.reset(prompt, seed)
    now = opened if isinstance(opened, Step) else Step(messages=opened)
    messages, replied, metrics, turn = list(now.messages), dict[str, float](), dict[str, float](), 0
    shared, single = now.reward, dict(now.rewards)
    while not now.done:
        name = now.policy or next(iter(policies))
        replied[name] = 0.0
        text = policies[name](messages, turn)
        messages.append({"role": "assistant", "content": text})
        stepped: Any = episode.step(Reply(text=text, tokens=[], messages=messages, turn=turn))
        now, turn = stepped, turn + 1
        messages += [] if now.done else now.messages
        metrics.update(now.metrics)
        shared += now.reward
        for policy, reward in now.rewards.items():
            single[policy] = single.get(policy, 0.0) + reward
    return Game({name: shared + single.get(name, 0.0) for name in replied}, metrics, messages)


PARALLEL = 8
"""Games that are played at the same time: their replies are sampled in one batch."""


def play_all(
    environment: Environment, prompts: Sequence[Any], policies: Mapping[str, Callable[[int], Replier]]
) -> list[Game]:
    """Play one episode of each prompt; its number is the seed, and chooses the policies' repliers."""

    def one(number: int) -> Game:
        return play(environment, prompts[number], number, {name: make(number) for name, make in policies.items()})

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(one, range(len(prompts))))


def sampled(client: Client, target: str, max_tokens: int) -> Callable[[int], Replier]:
    """A policy or a base model of the service as a player of :func:`play_all`, at temperature 1."""

    def replier(number: int) -> Replier:
        def reply(messages: Sequence[Message], turn: int) -> str:
            seed = number * 1000 + turn
            answer = client.sample(target, list(messages), max_tokens=max_tokens, temperature=1.0, seed=seed)
            return str(answer.text)

        return reply

    return replier


@dataclass(frozen=True)
class Point:
    """An evaluation of one version on the held-out prompts."""

    version: int
    mean: float
    stderr: float
    metrics: dict[str, float]
    """Means over the episodes that have them."""


@dataclass(kw_only=True)
class Learned:
    """One job's results."""

    name: str
    state: str
    reason: str
    curves: dict[str, list[Point]]
    """By policy that trains."""
    held_out: dict[str, list[Record]]
    """By policy, the results of its last evaluation."""
    training: dict[str, list[float]]
    """By policy, the mean reward of each step."""
    training_metrics: dict[str, list[dict[str, float]]]
    """By policy, the means of the environment's metrics in each step."""
    episodes: int
    tokens: int
    seconds: float
    notes: dict[str, Any] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[Point, Point]:
        """The first and the last evaluation of a policy."""
        return self.curves[policy][0], self.curves[policy][-1]


def points(evaluations: Sequence[Record], policy: str) -> list[Point]:
    """The curve of one policy, by version. Raises :class:`RookeryError` for a version without a mean."""
    found = []
    for evaluation in evaluations:
        if evaluation.policy != policy:
            continue
        if evaluation.mean is None:
            raise RookeryError(f"version {evaluation.version} of {policy}: every held-out episode failed")
        good = [result["metrics"] for result in evaluation.held_out if not result["error"]]
        names = sorted({name for metrics in good for name in metrics})
        means = {}
        for name in names:
            values = [metrics[name] for metrics in good if name in metrics]
            means[name] = sum(values) / len(values)
        found.append(Point(evaluation.version, evaluation.mean, evaluation.stderr or 0.0, means))
    return sorted(found, key=lambda point: point.version)


def learned(job: Job, seconds: float) -> Learned:
    """The results of an ended job."""
    view, evaluations, rows = job.show(), job.evaluations(), list(job.metrics(follow=False))
    names = [name for name, policy in view.spec.policies.items() if policy.get("train", True)]
    of = {name: [evaluation for evaluation in evaluations if evaluation.policy == name] for name in names}
    steps = {name: [row for row in rows if (row.get("policy") or names[0]) == name] for name in names}
    return Learned(
        name=job.name,
        state=view.state,
        reason=view.reason or "",
        curves={name: points(evaluations, name) for name in names},
        held_out={name: list(found[-1].held_out) for name, found in of.items() if found},
        training={name: [row.reward for row in found] for name, found in steps.items()},
        training_metrics={
            name: [{key.removeprefix(METRIC): row[key] for key in row if key.startswith(METRIC)} for row in found]
            for name, found in steps.items()
        },
        episodes=int(max(sum(row.episodes for row in found) for found in steps.values())),
        tokens=int(rows[-1].tokens_sampled) if rows else 0,
        seconds=seconds,
    )


def train(
    jobs: Jobs, folder: Path, after: After | None = None, first: Jobs | None = None
) -> tuple[dict[str, Learned], dict[str, Any]]:
    """Run jobs, an environment and further fields by name, at the same time on a service for them alone. ``after``
    is called while the service still serves their policies; its result is returned, too. Jobs of ``first`` end before
    the others are submitted, which may start from their weights; the seconds of those count from the start of all."""
    from rookery.server.launcher import EmbeddedService

    settings = Settings.alone(data=folder / "service", port=0, models=MODEL)
    began = time.monotonic()
    with ExitStack() as stack:
        service = stack.enter_context(EmbeddedService(settings))
        client = stack.enter_context(Client(service.url, service.key))
        print(f"The page of this run: {client.sign_in_link()}", flush=True)
        if first:
            completed(client, first, began)
        ended = completed(client, jobs, began)
        more = after(client, {name: job for name, (job, _) in ended.items()}) if after is not None else {}
        return {name: learned(job, seconds) for name, (job, seconds) in ended.items()}, more


def completed(client: Client, jobs: Jobs, began: float) -> dict[str, tuple[Job, float]]:
    """Run jobs at the same time to their end; each with the seconds from ``began`` to its end."""
    running = {
        name: client.train(name=name, base_model=MODEL, environment=environment, **fields)
        for name, (environment, fields) in jobs.items()
    }
    ended: dict[str, float] = {}
    shown = began
    while len(ended) < len(running):
        time.sleep(1.0)
        views = {name: job.show() for name, job in running.items() if name not in ended}
        for name, view in views.items():
            if view.state not in ("queued", "running"):
                ended[name] = time.monotonic() - began
                print(f"{name}: {view.state} after {ended[name]:.0f} s: {view.reason}", flush=True)
        if time.monotonic() - shown > SHOWN_SECONDS:
            shown = time.monotonic()
            line = ", ".join(f"{name} step {view.step}" for name, view in views.items())
            print(f"{shown - began:.0f} s: {line}", flush=True)
    for name, job in running.items():
        if (view := job.show()).state != "completed":
            raise RookeryError(f"{name}: {view.state}: {view.reason}")
    return {name: (job, ended[name]) for name, job in running.items()}


def options(about: str | None, steps: int, of: str) -> argparse.ArgumentParser:
    """The options of every task; ``of`` says whose ``steps`` they are."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--folder", help="where results go; a new folder in runs/")
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps of {of}")
    return parser


def learn(
    task: str,
    folder: str | None,
    jobs: Jobs,
    report: Callable[[Path, dict[str, Learned], dict[str, Any]], bool],
    after: After | None = None,
    charts: str = "chart: {folder}/curves.svg",
    first: Jobs | None = None,
) -> int:
    """Train a task and report it; returns the exit code. ``report`` prints and writes everything, and tells whether the
    policies learned. ``first`` as in :func:`train`."""
    place = output_folder(task, folder)
    try:
        runs, facts = train(jobs, place, after, first)
    except RookeryError as error:
        print(error)
        return 1
    passed = report(place, runs, facts)
    print(f"figures: {place / 'results.json'}, {charts.format(folder=place)}")
    return 0 if passed else 1


def output_folder(name: str, given: str | None) -> Path:
    """The folder of a run: the given one, or a new one in ``runs``."""
    folder = Path(given) if given else Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def commit() -> str:
    """The commit of this source tree, with ``+`` where files differ from it; empty where there is none."""
    here = Path(__file__).resolve().parent
    found = []
    for command in (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "-uno"]):
        found.append(subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip())
    return found[0] + "+" * bool(found[1])


def machine() -> str:
    """Cores and processor."""
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{os.cpu_count()} cores, {model}"


def write(folder: Path, task: str, command: str, runs: Mapping[str, Learned], facts: Mapping[str, Any]) -> None:
    """Write ``results.json``: figures and where they come from."""
    found: dict[str, Any] = {
        "task": task, "command": command, "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(),
        "model": MODEL, "facts": dict(facts), "runs": {},
    }  # fmt: skip
    for name, run in runs.items():
        found["runs"][name] = {
            "episodes": run.episodes,
            "tokens": run.tokens,
            "seconds": round(run.seconds, 1),
            "reason": run.reason,
            "notes": run.notes,
            "training": {policy: [round(reward, 4) for reward in curve] for policy, curve in run.training.items()},
            "training metrics": {
                policy: [{key: round(value, 4) for key, value in step.items()} for step in steps]
                for policy, steps in run.training_metrics.items()
            },
            "curves": {
                policy: [
                    {
                        "version": point.version,
                        "mean": round(point.mean, 4),
                        "stderr": round(point.stderr, 4),
                        "metrics": {key: round(value, 4) for key, value in point.metrics.items()},
                    }
                    for point in curve
                ]
                for policy, curve in run.curves.items()
            },
        }
    (folder / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def write_curves(
    folder: Path, title: str, run: Learned, levels: Mapping[str, float], y: str = "reward on held-out prompts"
) -> None:
    """Draw the curve of each policy, and levels to compare with, into ``curves.svg``."""
    lines = [
        Line(name, [(point.version, point.mean) for point in curve], [point.stderr for point in curve])
        for name, curve in run.curves.items()
    ]
    (folder / "curves.svg").write_text(line_chart(title, "version", y, lines, levels), encoding="utf-8")


def verdict(run: Learned, policy: str, constant: float) -> str:
    """One line about a policy's learning on the held-out prompts."""
    first, last = run.of(policy)
    error = (first.stderr**2 + last.stderr**2) ** 0.5
    gained = last.mean - first.mean > 2 * error
    beats = last.mean > constant
    words = "learned" if gained and beats else "rose, but a constant is better" if gained else "NOT learned"
    return (
        f"{policy}: {first.mean:.3f} -> {last.mean:.3f} +/- {last.stderr:.3f} on held-out prompts,"
        f" best constant {constant:.3f}: {words}"
    )
