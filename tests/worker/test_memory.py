"""The memory of a worker: it stays within its budget with many adapters, and does not grow from job to job."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from tests.support.dialled import Connection, Dialled
from tests.support.forked import ForkedProcess
from tests.support.live_objects import live_objects
from tests.support.peers import settle
from tests.support.small_model import save_small_model

from rookery import protocol
from rookery.errors import UserError
from rookery.settings import Settings
from rookery.worker import memory
from rookery.worker.model.adapter import PARTS
from rookery.worker.model.convert import prepare

MEGABYTE = 1 << 20
COUNTS = "objects.json"
"""The file to which a worker writes the numbers of its objects."""
WARM_JOBS, COUNTED_JOBS, JOBS_BETWEEN_COUNTS = 3, 8, 2
"""Jobs after which everything that is made once exists, those after which nothing more may exist, and those from one
count to the next: a leak grows from each count to the next, a pool that starts a thread or a connection only once."""
JOBS = int(os.environ.get("ROOKERY_MEMORY_JOBS") or 0)
NIGHTLY = pytest.mark.skipif(not JOBS, reason="minutes on the real model: make nightly")


@contextmanager
def serving(folder: Path, model: str, cache: Path, **settings: str) -> Iterator[tuple[Dialled, Connection, int]]:
    """A service, the connection of its worker, and the worker's process id."""
    with Dialled(folder / "artifacts") as service:
        environment = {**os.environ, "ROOKERY_TOKEN": "token", "ROOKERY_CACHE": str(cache), "ROOKERY_THREADS": "1"}
        environment |= {f"ROOKERY_{name.upper()}": value for name, value in settings.items()}
        counting = f"from tests.support.live_objects import count_on_signal; count_on_signal({str(folder / COUNTS)!r})"
        code = f"import sys; {counting}; from rookery.worker.process import main; sys.exit(main(sys.argv[1:]))"
        process = ForkedProcess(code, ["--connect", service.url, "--model", model], environment)
        try:
            link = service.connection(0)
            service.until(lambda: not link.hello.loading or link.of(protocol.Ready))
            yield service, link, process.pid
        finally:
            process.kill()
            process.communicate()


class Policy:
    """A policy whose messages a test sends as the controller would."""

    def __init__(self, service: Dialled, link: Connection, name: str, rank: int, rng: random.Random) -> None:
        self.service, self.link, self.name, self.rank, self.rng = service, link, name, rank, rng
        self.versions: list[protocol.AdapterRef] = []
        self._ticket = service.tickets.upload()
        link.send(
            protocol.InitAdapter(
                op=f"{name} init", policy=name, rank=rank, alpha=16.0, targets=list(PARTS), seed=rng.randrange(1 << 20),
                upload=self._ticket,
            )
        )  # fmt: skip

    def commit(self, op: str) -> None:
        """Wait for an operation's version and announce it."""
        done = self.link.done(f"{self.name} {op}")
        assert not done.error, done.error
        assert done.manifest is not None
        self.service.collect(self._ticket)
        self.versions.append(
            protocol.AdapterRef(
                policy=self.name, version=len(self.versions), hash=done.manifest.hash, rank=self.rank, alpha=16.0
            )
        )
        if len(self.versions) > 1:
            self.link.send(protocol.VersionCommitted(policy=self.name, lease=1, ref=self.versions[-1]))

    def generate(self, groups: int, members: int) -> list[tuple[list[int], list[str]]]:
        """Requests of groups with prompts of random lengths: each prompt and its requests."""
        sent = []
        for group in range(groups):
            prompt = [self.rng.randint(1, 250) for _ in range(self.rng.randint(10, 30))]
            names = [f"{self.name} {len(self.versions)} {group} {member}" for member in range(members)]
            for seed, name in enumerate(names):
                self.link.send(
                    protocol.Generate(
                        request=name, adapter=self.versions[-1], prompt=prompt, shared_prefix=len(prompt),
                        max_tokens=self.rng.randint(4, 16), temperature=1.0, seed=seed, stop_tokens=[], episode=name,
                    )
                )  # fmt: skip
            sent.append((prompt, names))
        return sent

    def train(self, groups: list[tuple[list[int], list[str]]], lease: int = 1) -> None:
        """A pass over finished groups and a committed step; does not wait for the step."""
        batch = protocol.TrainingBatch()
        for prompt, names in groups:
            streams = [self.link.finished(name) for name in names]
            assert all(stream.finish == "length" for stream in streams), [stream.error for stream in streams]
            members = [
                protocol.GroupMember(
                    tokens=one.tokens, logprobs=one.logprobs, advantages=[1.0] * len(one.tokens),
                    weights=[1.0] * len(one.tokens),
                )
                for one in streams
            ]  # fmt: skip
            batch.groups.append(protocol.SharedPrefixGroup(prompt=prompt, members=members))
            self.link.send(*(protocol.Abort(request=name) for name in names))
        offer = self.service.tickets.publish_batch(protocol.encode(batch))
        self._ticket = self.service.tickets.upload()
        step, common = len(self.versions), {"tenant": "t", "policy": self.name, "lease": lease, "steps": 0}
        self.link.send(
            protocol.ForwardBackward(
                op=f"{self.name} pass {step}", batch_ticket=offer, loss=protocol.Loss(name="importance_sampling"),
                temperature=1.0, parent=self.versions[-1], **common,
            ),
            protocol.OptimStep(
                op=f"{self.name} step {step}", adam=protocol.Adam(lr=0.01), upload=self._ticket, operations=1,
                parent=self.versions[-1], **common,
            ),
        )  # fmt: skip

    def end(self, *, keep_last: bool = True) -> None:
        """The policy's job is over: only its last version stays, or nothing, as when the job is deleted."""
        gone = self.versions[:-1] if keep_last else self.versions
        self.link.send(
            protocol.EvictArtifacts(policy=self.name),
            protocol.EvictArtifacts(hashes=[version.hash for version in gone]),
        )


def run_job(service: Dialled, link: Connection, name: str, rng: random.Random, *, keep_last: bool = True) -> None:
    policy = Policy(service, link, name, 8, rng)
    policy.commit("init")
    for step in (1, 2):
        policy.train(policy.generate(2, 4))
        policy.commit(f"step {step}")
    policy.end(keep_last=keep_last)


def chat(link: Connection, name: str) -> None:
    """A request to the base model."""
    link.send(
        protocol.Generate(
            request=name, adapter=None, prompt=[1, 2, 3], shared_prefix=0, max_tokens=4, temperature=1.0, seed=1,
            stop_tokens=[],
        )
    )  # fmt: skip
    assert link.finished(name).finish == "length"
    link.send(protocol.Abort(request=name))


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_no_object_of_a_worker_outlives_the_job_that_made_it(tmp_path: Path) -> None:
    """No type has one more object after each job with chats between. Where hashed files were remembered for ever, each
    job left five paths."""
    cache, rng = tmp_path / "cache", random.Random(3)
    model = str(save_small_model(tmp_path / "small"))
    prepare(model, cache)
    counts: list[Counter[str]] = []
    with serving(tmp_path, model, cache) as (service, link, pid):
        for number in range(1, WARM_JOBS + COUNTED_JOBS + 1):
            run_job(service, link, f"p{number}", rng, keep_last=False)
            chat(link, f"chat {number}")
            link.frames.clear()
            if number >= WARM_JOBS and (number - WARM_JOBS) % JOBS_BETWEEN_COUNTS == 0:
                counts.append(live_objects(pid, tmp_path / COUNTS))
    grown = {name: [count[name] for count in counts] for name in always_more(counts)}
    assert counts[0]["torch.Tensor"] and not grown, grown


def always_more(counts: list[Counter[str]]) -> list[str]:
    """The names that each count has more of than the one before, and in all one for each job at least."""
    rising = set.intersection(*(set(after - before) for before, after in pairwise(counts)))
    return sorted(name for name in rising if counts[-1][name] - counts[0][name] >= COUNTED_JOBS)


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_from_job_to_job(tmp_path: Path) -> None:
    """Where the kernels of all shapes were kept, the first 30 jobs took 740 MB. Below 10 kB a job over many."""
    count, cache, rng = JOBS or 30, tmp_path / "cache", random.Random(1)
    model = str(save_small_model(tmp_path / "small"))
    prepare(model, cache)
    with serving(tmp_path, model, cache) as (service, link, pid):
        sizes = [psutil.Process(pid).memory_info().rss]
        for number in range(count):
            run_job(service, link, f"p{number}", rng)
            link.frames.clear()
            sizes.append(psutil.Process(pid).memory_info().rss)
        assert sizes[-1] - sizes[0] < memory.OVERHEAD_BYTES + 16 * MEGABYTE
        if count > 500:
            half = statistics.median(sizes[-100:]) - statistics.median(sizes[count // 2 - 50 : count // 2 + 50])
            assert half / (count / 2 - 50) < 10_000


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "budget", "trained", "steps"),
    [("", 900 * MEGABYTE, 60, 2), pytest.param("smollm2-135m-instruct", 3 << 30, 12, 1, marks=NIGHTLY)],
)
def test_60_adapters_of_mixed_ranks_stay_within_the_budget(
    tmp_path: Path, model: str, budget: int, trained: int, steps: int
) -> None:
    """All generate at once and train; what has no room waits, and nothing fails."""
    cache, rng = tmp_path / "cache" if not model else Settings.load().cache, random.Random(2)
    model = model or str(save_small_model(tmp_path / "small"))
    prepare(model, cache)
    with serving(tmp_path, model, cache, memory_bytes=str(budget)) as (service, link, pid):
        policies = [Policy(service, link, f"p{i}", rank, rng) for i, rank in enumerate([8, 16, 32, 64] * 15)]
        for policy in policies:
            policy.commit("init")
        for step in range(1, steps + 1):
            sent = [policy.generate(1, 2) for policy in policies]
            for policy, groups in list(zip(policies, sent, strict=True))[:trained]:
                policy.train(groups)
            for policy in policies[:trained]:
                policy.commit(f"step {step}")
            for stream in [link.finished(name) for groups in sent for _, names in groups for name in names]:
                assert stream.finish == "length", stream.error
        beats = link.of(protocol.Heartbeat)
        peak = max(psutil.Process(pid).memory_info().rss, *(beat.gauges["worker_memory_bytes"] for beat in beats))
        assert peak < budget
        parts = [beat.memory_parts for beat in beats if beat.memory_parts]
        assert {"adapters", "kv_cache", "training_states"} <= parts[-1].keys()
        for sizes in parts:
            assert all(used <= most for used, most in sizes.values()), sizes
        assert max(sizes["training_states"][0] for sizes in parts) > 0.5 * parts[-1]["training_states"][1]


def test_budget_that_the_base_model_fills_is_refused() -> None:
    with pytest.raises(UserError, match="ROOKERY_MEMORY_BYTES"):
        memory.divide(1 << 30, 1 << 30, "cpu")
    for kind in memory.SHARES:
        budget = memory.divide(4 << 30, 1 << 30, kind)
        shares = (budget.kv_cache, budget.adapters, budget.training_states, budget.activations)
        assert budget.base + sum(shares) == pytest.approx(4 << 30, abs=4)


class LimitedCalls:
    """Calls of which as many succeed as there is ``room``; they are ``done`` then."""

    def __init__(self) -> None:
        self.room, self.done = 0, list[str]()

    async def __call__(self, name: str) -> None:
        if not self.room:
            raise memory.NoRoom
        self.room -= 1
        self.done.append(name)


async def test_calls_wait_for_memory_in_order_of_arrival() -> None:
    queue, calls = memory.MemoryQueue(), LimitedCalls()
    tasks = [asyncio.create_task(queue.run(lambda name=name: calls(name))) for name in "abc"]  # type: ignore[misc]
    await settle(1)
    assert queue.waiting == 3 and not calls.done
    calls.room = 2
    queue.notify()
    await asyncio.gather(*tasks[:2])
    assert calls.done == ["a", "b"] and queue.waiting == 1
    tasks[2].cancel()


async def test_clients_go_before_calls_that_came_earlier() -> None:
    queue, calls = memory.MemoryQueue(), LimitedCalls()
    names = {"a": False, "b": False, "x": True, "y": True}
    async with asyncio.timeout(30):
        tasks = {
            name: asyncio.create_task(queue.run(lambda name=name: calls(name), first=first))  # type: ignore[misc]
            for name, first in names.items()
        }
        await settle(1)
        assert queue.waiting == 4 and queue.waited >= 0
        tasks["x"].cancel()
        await asyncio.wait([tasks["x"]])
        for name in "yab":
            calls.room = 1
            queue.notify()
            await tasks[name]
    assert calls.done == ["y", "a", "b"] and queue.waiting == 0 == queue.waited


async def test_calls_with_room_run_side_by_side() -> None:
    """A group's requests reach the engine together when their adapter is new."""
    queue, started, both = memory.MemoryQueue(), 0, asyncio.Event()

    async def call() -> None:
        nonlocal started
        started += 1
        if started == 2:
            both.set()
        await both.wait()

    async with asyncio.timeout(30):
        await asyncio.gather(queue.run(call), queue.run(call))
