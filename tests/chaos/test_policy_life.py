"""The life of a job with several policies among real processes: it is paused, killed, exported, continued by another
job, and restored from a backup, and each policy stays itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.chaos.driver import PATIENCE_SECONDS, Deployment, wait_until
from tests.chaos.test_policy_kills import GROUPS, POLICIES, STEPS, check, heads, one_is_ahead, versions
from tests.support.small_model import save_small_model

from rookery.client import Client, Job
from rookery.environments.base import Environment, Reply, Split, Step
from rookery.errors import NotFound
from rookery.storage.backup import back_up, restore
from rookery.worker.model.convert import prepare

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(6 * PATIENCE_SECONDS)]

VICTIMS = ("worker", "service", "everything")
LEARNS: dict[str, Any] = {"optimizer": {"lr": 0.01}}
WEIGHTS = "adapter_model.safetensors"


class Round(Environment):
    """Each policy replies once; the rewards of the first two are a function of what was said."""

    deterministic = True

    def __init__(self, *speakers: str) -> None:
        self.speakers = speakers

    def prompts(self, split: Split) -> list[int]:
        return list(range(11))

    def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Begin with {prompt}."}]

    def step(self, reply: Reply) -> Step:
        if reply.turn + 1 < len(self.speakers):
            return Step(messages=[{"role": "user", "content": "More."}], policy=self.speakers[reply.turn + 1])
        said = [message["content"] for message in reply.messages if message["role"] == "assistant"]
        draws = [sha256(text.encode()).digest()[0] / 255 for text in said]
        return Step(done=True, rewards={"main": draws[0], "judge": draws[1]})


SPEAKERS = tuple(POLICIES)


def host(client: Client) -> None:
    """In this process, which outlives the service's."""
    client.host("pair", Round(*SPEAKERS[:2]))
    client.host("all", Round(*SPEAKERS))


def submit(client: Client, model: str, name: str, policies: Mapping[str, Any], steps: int) -> Job:
    hosted = "all" if len(policies) > 2 else "pair"
    return client.submit(
        {
            "name": name,
            "base_model": model,
            "environment": {"hosted": hosted, "max_turns": len(policies), "return_timeout": 60},
            "policies": {
                name: {**about, **LEARNS} if about.get("train", True) else about for name, about in policies.items()
            },
            "algorithm": {"group_size": 2, "groups_per_step": GROUPS, "max_staleness": 1},
            "sampling": {"max_tokens": 6},
            "checkpoints": {"keep_last": STEPS + 1},
            "stop": {"steps": steps},
        }
    )


def from_job(job: Job, policy: str, **more: Any) -> dict[str, Any]:
    """A policy that begins with the weights of another job's."""
    return {**POLICIES[policy], "warm_start": {"job": job.id, "policy": policy, **more}}


def exported(job: Job, folder: Path, names: tuple[str, ...]) -> dict[tuple[str, int], bytes]:
    """The weights of every version of these policies, as they are downloaded."""
    found = {}
    for name in names:
        for version in job.versions(name):
            target = job.adapter(version.version, name).download(folder / f"{name}{version.version}")
            tensors = sorted(load_file(target / WEIGHTS).items())
            found[name, version.version] = b"".join(tensor.float().numpy().tobytes() for _, tensor in tensors)
    return found


def test_policies_of_one_job_live_through_all_that_happens_to_it(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "small")
    cache = tmp_path / "cache"
    prepare(str(model), cache)
    pair = {name: POLICIES[name] for name in ("main", "judge")}
    with Deployment(tmp_path / "one", cache, model, workers=1) as town:
        client, path = town.client, town.data / "rookery.db"
        host(client)
        source = submit(client, town.model, "source", pair, 2)
        assert source.wait(PATIENCE_SECONDS).reason == "main: 2 steps; judge: 2 steps"
        starts = exported(source, tmp_path / "source", ("main", "judge"))
        judge = from_job(source, "judge", version=1)
        policies = {**POLICIES, "main": from_job(source, "main"), "judge": judge, "held": {**judge, "train": False}}
        job = submit(client, town.model, "several", policies, STEPS)

        wait_until(lambda: heads(path, job.id).get("main", -1) > 0, "the first step is committed")
        assert job.pause().state == "paused"
        paused = heads(path, job.id)
        job.resume()
        for victim in VICTIMS:
            wait_until(partial(one_is_ahead, path, job.id, heads(path, job.id)["main"]), "one policy is ahead")
            town.kill(victim)
        wait_until(lambda: client.job(job.id).show().state == "completed", "it is completed")
        check(path, job.id)
        assert all(paused[name] <= head for name, head in heads(path, job.id).items())
        names = ("main", "judge", "held")
        kept = exported(job, tmp_path / "kept", names)
        assert {name: sum(one == name for one, _ in kept) for name in names} == {
            "main": STEPS + 1, "judge": STEPS + 1, "held": 1,
        }  # fmt: skip
        assert len(set(kept.values())) == len(kept) - 1, "judge and held begin with the same weights"
        assert kept["main", 0] == starts["main", 2]
        assert kept["judge", 0] == kept["held", 0] == starts["judge", 1]

        source.delete()
        assert exported(job, tmp_path / "again", names) == kept, "the weights that others use outlive their job"
        for name in names:
            assert client.sample(f"{job.id}/{name}", "Go on.", max_tokens=3).tokens
        fork = submit(client, town.model, "fork", {
            **POLICIES, "main": from_job(job, "main", version=3), "judge": from_job(job, "judge"),
            "held": {**policies["held"], "warm_start": {"job": job.id, "policy": "held"}},
        }, STEPS)  # fmt: skip
        wait_until(partial(one_is_ahead, path, fork.id, 0), "one policy of the fork is ahead")
        back_up(town.data, "", tmp_path / "backup")
        fork.cancel()
        job.delete()
        with pytest.raises(NotFound):
            client.job(job.id).show()

    restore(tmp_path / "backup", tmp_path / "two" / "data", "")
    with Deployment(tmp_path / "two", cache, model, workers=1) as town:
        path = town.data / "rookery.db"
        host(town.client)
        assert exported(town.client.job(job.id), tmp_path / "restored", names) == kept
        fork = town.client.job(fork.id)
        wait_until(lambda: fork.show().state == "completed", "it is completed")
        check(path, fork.id)
        begun = exported(fork, tmp_path / "fork", names)
        assert (begun["main", 0], begun["judge", 0]) == (kept["main", 3], kept["judge", STEPS])
        assert begun["held", 0] == kept["held", 0]
        assert [version["hash"] for version in versions(path, fork.id, "held")] == [
            version["hash"] for version in versions(path, job.id, "held")
        ]
