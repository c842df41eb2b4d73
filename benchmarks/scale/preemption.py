"""The cost of lost workers, with real processes: kills in the middle of long generations, random kills over a training
run, a worker that joins, a service that is killed while its workers generate, and T_seed that begins far off.

``python -m benchmarks.scale.preemption [--only PART ...]``. Processes are those of the chaos tests: a service without
workers of its own, workers that dial in. The kill measures use the real model; the training run with kills uses a small
random one, so that a killed worker is back within seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, MODEL, Result, command
from benchmarks.lib.model import chat_ids
from benchmarks.lib.workload import questions
from tests.chaos.driver import Deployment, wait_until
from tests.chaos.test_chaos import STEPS, end_of, submit
from tests.support.small_model import save_small_model

from rookery.settings import Settings
from rookery.worker.model.convert import prepare

REQUESTS = 16
TOKENS = 160
SHARES = (0.25, 0.5, 0.75)
KILLS = 50
KILL_SECONDS = (0.5, 4.0)
"""Between two random kills: from less than a worker takes to return, to long enough for steps to be taken."""
MEGABYTE = 1e6
THREE = ("one", "two", "three")
SEEDS = (0, 1, 2, 3)

Replies = list[Future[Any]]


def town(folder: Path, model: str, cache: Path, **settings: str) -> Deployment:
    return Deployment(folder, cache, Path(model), workers=0, **settings)


def ask(running: Deployment, pool: ThreadPoolExecutor) -> Replies:
    """Long texts, each with a seed of its own."""
    texts = questions(REQUESTS)
    return [
        pool.submit(running.client.sample, running.model, text, max_tokens=TOKENS, seed=seed, temperature=1.5)
        for seed, text in enumerate(texts)
    ]


def told(replies: Replies) -> list[Any]:
    return [(reply.tokens, reply.logprobs) for reply in (future.result() for future in replies)]


def generated(running: Deployment, worker: str, least: int) -> int:
    """Tokens that a worker's process has sampled, once it has told of ``least``."""
    wait_until(lambda: running.wait_serving(worker).beat["generated"] >= least, f"{worker} has sampled {least} tokens")
    time.sleep(2.0)  # a beat or more: had it sampled others, it would have told
    return int(running.wait_serving(worker).beat["generated"])


# --- kill -9 in the middle of long generations ------------------------------------------------------------------------


def kills(result: Result) -> None:
    cache = Settings.load().cache
    again, differing, missing = 0, 0, 0
    flushed: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(REQUESTS) as pool:
        with town(Path(folder) / "calm", MODEL, cache) as running:
            running.join("one")
            running.wait_serving("one")
            calm = told(ask(running, pool))
        total = sum(len(tokens) for tokens, _ in calm)
        for share in SHARES:
            with town(Path(folder) / str(share), MODEL, cache) as running:
                running.join("one")
                running.wait_serving("one")
                replies = ask(running, pool)
                wait_until(
                    lambda running=running, share=share: running.metric_total("sampled_tokens") >= share * total,
                    "tokens came",
                )
                flushed.append(running.worker("one").max_flush_tokens)
                running.joined["one"].kill()
                running.joined.pop("one").wait()
                wait_until(lambda running=running: running.worker("one").state == "suspect", "it is noticed")
                received = running.metric_total("sampled_tokens")
                began = time.perf_counter()
                running.join("two")
                running.wait_serving("two")
                result.add(f"killed at {share:.0%}: a new worker serves after", [time.perf_counter() - began], "s")
                texts = told(replies)
                repeated = generated(running, "two", total - received) - (total - received)
                again += repeated
                differing += sum(one != other for one, other in zip(texts, calm, strict=True))
                missing += abs(running.metric_total("sampled_tokens") - total)
    rows = f"{len(SHARES)} kills, {REQUESTS} requests of up to {TOKENS} tokens, {total} tokens"
    result.add("received tokens generated again", [again], "tokens", rows)
    result.add("texts that differ from the uninterrupted run's, log-probabilities included", [differing], "texts", rows)
    result.add("tokens lost or received twice", [missing], "tokens", rows)
    result.add("largest flush: what a kill costs at most", flushed, "tokens", "at the kills")
    result.judge("received tokens generated again: 0", str(again), again == 0)
    result.judge("every text equals the uninterrupted run's", f"{differing} differ", differing == 0)
    result.judge("tokens lost or duplicated: 0", str(missing), missing == 0)
    step = max(1.0, Settings().worker.flush_seconds / 0.04)
    bound = REQUESTS * (step + 1)
    most = max(flushed)
    result.judge(
        "generated and not sent <= what all rows sample in a flush interval", f"{most:.0f} tokens", most <= bound,
        f"{REQUESTS} rows, at most {step + 1:.1f} steps of 40 ms or more",
    )  # fmt: skip


# --- migrating, computing again, dropping -----------------------------------------------------------------------------


def overhead(result: Result) -> None:
    """With the engine alone, which is where the difference lies: what is left to do at another worker."""
    prompts = chat_ids(questions(REQUESTS))
    engine = Contender("engine", [sys.executable, str(HERE / "lib" / "contender_engine.py")])
    spent: dict[tuple[str, float], list[float]] = {}
    for turn in range(4):
        for share in SHARES:
            done = round(share * TOKENS)
            for how, task in {
                "migrate": {"tokens": TOKENS, "given": done},
                "compute again": {"tokens": TOKENS},
                "undisturbed": {"tokens": TOKENS - done},
            }.items():
                seconds = engine.run(prompts=prompts, adapters=4, **task)["seconds"]
                if turn:
                    spent.setdefault((how, share), []).append(seconds)
    engine.close()
    points = []
    for share in SHARES:
        rows = {
            how: result.add(f"interrupted at {share:.0%}, the rest: {how}", spent[how, share], "s")
            for how in ("undisturbed", "migrate", "compute again")
        }
        extra = {how: rows[how].median - rows["undisturbed"].median for how in ("migrate", "compute again")}
        points.append({"share": share, **{how: row.median for how, row in rows.items()}})
        saved = 1 - extra["migrate"] / extra["compute again"]
        result.add(f"interrupted at {share:.0%}: share of the overhead that migrating saves", [saved], "")
    result.notes.append(
        "Dropping costs as much computing as computing again (another request takes the place), and the text itself: at"
        " each of these shares every unfinished text is lost, so that short texts are left over."
    )
    result.data["overhead"] = points


# --- random kills over a training run ---------------------------------------------------------------------------------


def training(result: Result) -> None:
    """One job at a time: packed with others, a step's gradient is summed in another order each time, and the weights
    after it differ in their last bits, with and without kills."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_small_model(folder / "small")
        prepare(str(model), folder / "cache")
        with town(folder / "run", str(model), folder / "cache", retry_limit=str(KILLS)) as running:
            for worker in THREE:
                running.join(worker, "--preemptible")
                running.wait_serving(worker)
            running.host()
            calm = [end_of(running, [submit(running, "steady", seed=seed)])[0] for seed in SEEDS]
            chance, deaths, jobs = random.Random(0), 0, 0
            equal, compared = 0, 0
            while deaths < KILLS:
                seed = SEEDS[jobs % len(SEEDS)]
                job = submit(running, "steady", seed=seed)
                jobs += 1
                while deaths < KILLS and job.show().state in ("queued", "running"):
                    time.sleep(chance.uniform(*KILL_SECONDS))
                    running.kill(chance.choice(THREE))
                    deaths += 1
                (after,) = end_of(running, [job])
                after.check()
                equal += after.assert_equal_episodes(calm[seed])
                compared += len(after.outcomes)
            migrated, losses = running.metric_total("requests_migrated"), running.metric_total("worker_losses")
            tried = running.metric_total("training_retries")
            for worker in THREE:
                running.wait_serving(worker)  # the last one killed is back: what is just starting cannot leave in order
        note = f"{jobs} jobs of {STEPS} steps, one after another, on {len(THREE)} workers, all of which train"
        result.add("random kills of workers", [deaths], "kills", note)
        result.add("of them noticed while they worked", [losses], "losses")
        result.add("requests that went on elsewhere", [migrated], "requests")
        result.add("training steps that went on elsewhere", [tried], "operations")
        result.add("episodes", [compared], "episodes")
        result.judge(
            f"{KILLS} random kills: every job takes its {STEPS} steps, no group twice, every text equal",
            f"{jobs} jobs, {equal} of {compared} texts equal", equal == compared,
        )  # fmt: skip


# --- joining ----------------------------------------------------------------------------------------------------------


def joining(result: Result) -> None:
    """From the start of the process to its first token of a running job's policy. Its cache has the base model, as a
    node's image would, and no adapter."""
    cache = Settings.load().cache
    first, loaded, pulled, lent = [], [], [], []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder, town(Path(folder) / "t", MODEL, cache) as running:
            running.join("one")
            running.wait_serving("one")
            rows = [{"prompt": text, "answer": ""} for text in questions(32)]
            running.client.submit(
                {
                    "name": "long",
                    "base_model": MODEL,
                    "environment": {"id": "jsonl", "rows": rows, "verifier": {"name": "regex", "pattern": "[a-m]"}},
                    "algorithm": {"group_size": 8, "groups_per_step": 16, "max_staleness": 1},
                    "sampling": {"max_tokens": TOKENS},
                    "stop": {"steps": 20},
                }
            )
            wait_until(
                lambda running=running: running.metric_total("sampled_tokens") > 2000,
                "the job is in the middle of a step",
            )
            elsewhere = Path(folder) / "elsewhere"
            (elsewhere / "models").mkdir(parents=True)
            (elsewhere / "models" / MODEL).symlink_to(prepare(MODEL, cache))
            began = time.perf_counter()
            running.join("two", "--preemptible", "--roles", "rollout", "--cache", str(elsewhere))
            wait_until(lambda running=running: running.worker("two") is not None, "it dialled in")
            running.wait_serving("two")
            loaded.append(time.perf_counter() - began)
            wait_until(lambda running=running: running.worker("two").beat["generated"] > 0, "its first tokens")
            first.append(time.perf_counter() - began)
            beat = running.worker("two").beat
            lent.append(beat["gauges"]["pulled_from_peers_bytes"] / MEGABYTE)
            pulled.append(lent[-1] + beat["gauges"]["pulled_from_service_bytes"] / MEGABYTE)
    result.add("a worker that joins in the middle of a step serves after", loaded, "s", "Python, torch, model, adapter")
    result.add("its first tokens were told after", first, "s", "beats come every half second")
    result.add("bytes pulled by then", pulled, "MB", "the versions in use, rank 16 in float32")
    result.add("of them from the worker that had them", lent, "MB")


# --- the service is killed while three workers generate ---------------------------------------------------------------


def restart(result: Result) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_small_model(folder / "small")
        prepare(str(model), folder / "cache")
        with town(folder / "run", str(model), folder / "cache") as running:
            for worker in THREE:
                running.join(worker)
                running.wait_serving(worker)
            calm = end_of(running, [submit(running, "jsonl", seed=1)])[0]
            before = sum(generated(running, worker, 0) for worker in THREE)
            job = submit(running, "jsonl", seed=1)
            deaths = 4
            for death in range(deaths):
                running.wait_for_episodes([job], (death * 8 + 2, 0.1))
                running.kill("service")
            story = end_of(running, [job])[0]
            story.check()
            same = story.assert_equal_episodes(calm)
            after = sum(generated(running, worker, 0) for worker in THREE)
            again = after - before - story.sampled
            twice = json.loads(story.row["counters"])["tokens"] - story.sampled
    result.add("the service killed and restarted while 3 workers generate", [deaths], "times")
    result.add("tokens that it received twice, or not at all", [twice], "tokens", f"of {story.sampled}")
    result.add("tokens sampled again", [again], "tokens", "not sent yet when their request moved to another worker")
    result.judge(
        "running requests are picked up: no token received twice, texts equal", f"{twice} tokens, {same} texts equal",
        twice == 0 and same == len(calm.outcomes),
    )  # fmt: skip


PARTS: dict[str, tuple[str, Callable[[Result], None]]] = {
    "kills": ("kill -9 in the middle of long generations", kills),
    "overhead": ("A generation is interrupted: going on, computing again", overhead),
    "training": ("Random kills of workers over training runs", training),
    "joining": ("A worker joins in the middle of a step", joining),
    "restart": ("The service is killed while three workers generate", restart),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What losing workers costs, with real processes.")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    for name in parser.parse_args().only:
        title, measure = PARTS[name]
        print(f"{name}:", flush=True)
        result = Result(f"preemption_{name}", f"{title}, with real processes", command())
        measure(result)
        result.save()


if __name__ == "__main__":
    main()
