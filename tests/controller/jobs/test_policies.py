"""Jobs with several policies: who replies, who learns from what, frozen policies, restarts."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.controller.jobs.test_job import finish
from tests.support.peers import ADAPTER, MODEL, ScriptedWorker, Service, job_of, user_message
from tests.support.replies import Group
from tests.worker.trainer.test_trainer import adapter_folder, decoder, forward_backward, gradient, trainer
from tests.worker.trainer.test_trainer import finish as finish_passes

from rookery import protocol
from rookery.aio import Signal
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.controller.jobs.buffer import GroupBuffer
from rookery.controller.jobs.registry import STEPS_UNKNOWN
from rookery.controller.jobs.step import make_batch
from rookery.controller.jobs.trajectory import EpisodeResult, Trajectory, episode_result_decoder
from rookery.errors import NotFound, UserError
from rookery.scheduling.job_rules import select_batch
from rookery.spec.job import JobSpec
from rookery.spec.parsing import SpecError, parse_job
from rookery.storage.models import GroupRow, VersionRow
from rookery.storage.repositories import jobs
from rookery.storage.repositories import versions as version_rows

PAIR: dict[str, Any] = {"solver": {"rank": 4}, "verifier": {"rank": 8, "seed": 1}}


def follows(policy: str, every: int = 1) -> dict[str, Any]:
    return {"follows": {"policy": policy, "every": every}}


def debate(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
    """The solver replies, the verifier judges, the solver replies again; each has a reward of its own."""
    if isinstance(message, protocol.Reset):
        return None
    if message.turn < 2:
        speaker = "verifier" if message.turn == 0 else "solver"
        return {"messages": [user_message(f"now {speaker}")], "policy": speaker, "reward": 0.25}
    first, judged = (len(text.content) for text in message.messages if text.role == "assistant"), message.turn
    rewards = {"solver": float(sum(first) % 3), "verifier": float(len(message.text) % 2 + judged)}
    return {"done": True, "rewards": rewards}


async def submit(service: Service, **changes: Any) -> str:
    view, _ = await service.controller.submit("alice", job_of(**{"policies": PAIR} | changes))
    return view.id


def chain(service: Service, job: str, name: str) -> list[VersionRow]:
    """The versions of a policy; they have no gap, and each has the next parent."""
    policy = service.database.read(jobs.get_policy, "alice", job, name)
    versions = service.database.read(version_rows.versions, "alice", policy.id)
    assert [v.version for v in versions] == list(range(len(versions)))
    assert [v.parent for v in versions] == [None, *range(len(versions) - 1)]
    return versions


def trained(worker: ScriptedWorker, service: Service, job: str, name: str) -> list[protocol.TrainingBatch]:
    policy = service.database.read(jobs.get_policy, "alice", job, name)
    names = {op.op for op in worker.operations if isinstance(op, protocol.ForwardBackward) and op.policy == policy.id}
    return [batch for op, batch in worker.batches.items() if op in names]


async def test_each_policy_learns_from_its_replies_and_rewards(service: Service) -> None:
    worker, _ = await service.join(script=debate)
    job = await submit(service)
    view = await service.ends(job)
    assert view.reason == "solver: 2 steps; verifier: 2 steps" and (view.step, view.steps) == (4, 4)
    assert not any(op.logprobs for op in worker.operations if isinstance(op, protocol.ForwardBackward)), "nobody reads"
    assert [len(chain(service, job, name)) for name in PAIR] == [3, 3]
    results = [
        episode_result_decoder.decode(episode.trajectories)
        for _, episode in service.database.read(jobs.recent_episodes, "alice", job, 100)
    ]
    assert len(results) == 8
    for result in results:
        assert result.speakers == ["solver", "verifier", "solver"]
        parts = {name: result.of(name) for name in PAIR}
        for at, whole in enumerate(result.trajectories):
            masks = [part.trajectories[at].mask for part in parts.values() if part is not None]
            assert [sum(flags) for flags in zip(*masks, strict=True)] == [int(flag) for flag in whole.mask]
        for name, part in parts.items():
            assert part is not None and part.reward == pytest.approx(0.5 + result.rewards[name])
            assert len(part.replies) == (2 if name == "solver" else 1)
    for name in PAIR:  # of each member of a batch only this policy's tokens have a weight
        of_policy = [part for result in results if (part := result.of(name)) is not None]
        wanted = Counter(tuple(t.tokens) + tuple(t.mask) for part in of_policy for t in part.trajectories)
        members = [m for batch in trained(worker, service, job, name) for unit in batch.groups for m in unit.members]
        assert members
        for member in members:
            assert wanted[tuple(member.tokens) + tuple(bool(weight) for weight in member.weights)] > 0
    rows = await service.controller.queries.metrics("alice", job)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert Counter((row["policy"], row["policy_step"]) for row in rows) == Counter(
        (name, step) for name in PAIR for step in (1, 2)
    )
    for row in service.groups(job):
        assert row["state"] == "consumed" and sorted(json.loads(row["uses"]).values() if isinstance(row["uses"], str)
                                                     else row["uses"].values()) in ([1, 1], [2, 2])  # fmt: skip


async def test_a_policy_stops_and_steps_by_its_rules(service: Service) -> None:
    worker, _ = await service.join(script=debate)
    evicted = list[int]()

    async def answer(operation: Any) -> None:
        """As usual; how many policies the worker keeps no state of by then."""
        evicted.append(len({one.policy for one in worker.other if isinstance(one, protocol.EvictArtifacts)} - {""}))

    worker.answer = answer
    policies = {
        "solver": {"stop": {"steps": 1}},
        "verifier": {"algorithm": {"groups_per_step": 1, "max_staleness": 1}, "sampling": {"max_tokens": 3}},
    }
    job = await submit(service, policies=policies, stop__steps=3)
    view = await service.ends(job)
    assert view.reason == "solver: 1 step; verifier: 3 steps" and (view.step, view.steps) == (4, 4)
    assert evicted[-1] == 1, "the solver's, which has stopped"
    for _, episode in service.database.read(jobs.recent_episodes, "alice", job, 100):
        part = episode_result_decoder.decode(episode.trajectories).of("verifier")
        assert part is not None and part.num_action_tokens <= 3


@pytest.mark.parametrize(
    ("solver", "job", "first", "last"),
    [
        ({"steps": 1}, {"stop__steps": 3}, 3, 1),
        ({"steps": 3}, {"stop__steps": 3}, 3, 1),  # both step in each round of a plan
        ({"steps": 9, "reward": -1.0}, {"stop__steps": 2}, 9, 1),  # the solver stops after one step
        ({"steps": 2}, {"stop": {"tokens": 1}}, STEPS_UNKNOWN, STEPS_UNKNOWN),
    ],
)
async def test_steps_left_are_the_most_of_any_policy_that_trains(
    service: Service, solver: dict[str, Any], job: dict[str, Any], first: int, last: int
) -> None:
    worker, _ = await service.join(script=debate)
    registry, seen = service.controller.jobs, set[int]()

    async def look(op: Any) -> None:
        if registry.running():
            seen.add(registry.steps_left())

    worker.answer = look
    policies = {name: dict(about) for name, about in PAIR.items()}
    policies["solver"]["stop"] = solver
    await service.ends(await submit(service, policies=policies, **job))
    assert (max(seen), min(seen)) == (first, last)


async def test_frozen_partner_keeps_its_bytes_and_base_model_replies_without_an_adapter(service: Service) -> None:
    worker, _ = await service.join(script=debate)
    source = await submit(service, policies={"main": {"rank": 4}}, environment={"hosted": "task"})
    service.peers[1].script = None
    await service.ends(source)
    service.peers[1].script = debate
    frozen = {"rank": 4, "train": False, "warm_start": {"job": source}}
    before = service.artifacts.path(chain(service, source, "main")[-1].hash, ADAPTER).read_bytes()
    for partner in (frozen, {"train": False, "base": True}):
        worker.operations.clear()
        job = await submit(service, policies={"solver": {"rank": 4}, "verifier": partner})
        view = await service.ends(job)
        assert view.reason == "2 steps" and len(chain(service, job, "solver")) == 3
        assert {op.policy for op in worker.operations if not isinstance(op, protocol.InitAdapter)} == {
            service.database.read(jobs.get_policy, "alice", job, "solver").id
        }
        if "base" not in partner:
            (version,) = chain(service, job, "verifier")
            assert service.artifacts.path(version.hash, ADAPTER).read_bytes() == before
        else:
            assert [policy.name for policy in view.policies] == ["solver"]


async def test_reward_of_an_episode_is_that_of_the_first_policy_that_trains(service: Service) -> None:
    """Also where another one begins the episode. Each view names it."""
    await service.join(script=debate)
    policies = {"verifier": {"train": False, "base": True}, "solver": {"rank": 4}}
    job = await submit(service, policies=policies)
    view = await service.ends(job)
    rows = await service.controller.queries.metrics("alice", job)
    assert view.policy == "solver" and view.rewards == [row["reward"] for row in rows]
    found = service.database.read(jobs.recent_episodes, "alice", job, 100)
    earned = [(row.reward, episode_result_decoder.decode(row.trajectories)) for _, row in found]
    assert any(result.rewards["solver"] != result.rewards["verifier"] for _, result in earned)
    assert all(reward == result.reward + result.rewards["solver"] for reward, result in earned)
    episodes = service.controller.queries.episodes
    page = await episodes.groups("alice", job, step=1, state=None, offset=0, limit=9)
    assert {one.policy for group in page.groups for one in (group, *group.members)} == {"solver"}
    assert all(group.uses == {} for group in page.groups), "one policy trains"


async def test_views_and_counters_name_the_policy_of_each_figure(service: Service) -> None:
    def script(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
        answer = debate(message)
        return answer and answer | ({"rewards": {**answer["rewards"], "verifier": 1.0}} if "rewards" in answer else {})

    await service.join(script=script)
    job = await submit(service, policies={**PAIR, "judge": {"train": False, "base": True}}, evaluation={"prompts": 0})
    counters = (await service.ends(job)).counters
    parts = {name: counters.get(f"zero_variance_groups/{name}", 0) for name in (*PAIR, "judge")}
    consumed = sum(row["state"] == "consumed" for row in service.groups(job))
    assert parts["verifier"] == consumed and parts["solver"] < consumed and parts["judge"] == 0
    assert counters["zero_variance_groups"] == sum(parts.values())
    for row in service.groups(job):
        group = await service.controller.queries.episodes.group("alice", job, row["id"])
        assert group.uses == dict.fromkeys(PAIR, group.consumed_by) and group.policy == "solver"


async def test_a_policy_without_weights_is_refused_by_its_reason(service: Service) -> None:
    await service.join(script=debate)
    three = {**PAIR, "judge": {"train": False, "base": True}, "old": {"train": False, **follows("solver")}}
    job = await submit(service, name="debate", policies=three)
    await service.ends(job)
    target = service.controller.completions.find
    with pytest.raises(NotFound, match=r"^job debate has no policy 'critic'; it has solver, verifier, judge, old$"):
        await target("alice", "debate/critic")
    for version in ("@7", "@x"):
        with pytest.raises(UserError, match="judge is the base model, without versions"):
            await target("alice", f"debate/judge{version}")
    assert (await target("alice", "debate/judge@latest")).adapter is None
    with pytest.raises(NotFound, match=rf"^no version 99 of policy solver of job {job}; its newest is 2$"):
        await target("alice", "debate@99")
    for name, says in (
        ("critic", "job debate has no policy 'critic'; it has solver, verifier, judge, old"),
        ("judge", f"judge of job debate has no weights: it is the base model {MODEL}"),
        ("old", "old of job debate has no weights: it replies with versions of solver"),
    ):
        with pytest.raises(NotFound, match=says):
            await service.controller.queries.versions("alice", job, name)
        with pytest.raises(NotFound, match=says):
            await service.controller.queries.adapter("alice", job, name, None)
        start = {"main": {"rank": 4, "warm_start": {"job": "debate", "policy": name}}}
        with pytest.raises(SpecError, match=rf"policies\.main\.warm_start: {says}"):
            await submit(service, policies=start)


async def test_a_policy_of_all_parameters_is_no_warm_start(service: Service) -> None:
    await service.join()
    job = await submit(service, name="whole", policies={"main": {"full": True, "optimizer": {"lr": 1e-5}}})
    await service.ends(job)
    with pytest.raises(SpecError, match=r"warm_start: main of job whole has all parameters .*, not a LoRA"):
        await submit(service, policies={"main": {"warm_start": {"job": job}}})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"policy": "critic", "messages": [user_message("x")]}, "names the policy 'critic' in turn 1; the job has"),
        (
            {"done": True, "rewards": {"critic": 1.0}},
            "names the policy 'critic' in turn 0; the job has solver",
        ),
        ({"done": True, "rewards": {"verifier": 1.0}}, "rewards the policy 'verifier', which has no reply"),
        ({"done": True, "policy": "critic"}, "names the policy 'critic' in turn 1; the job has solver"),
        ({"done": True, "policy": "c\nr" * 60}, "names the policy 'c\\nrc"),
        ({"done": True, "rewards": {"solver": 1e300}}, "add up to 1e+300 in turn 0"),
        ({"done": True, "rewards": {"solver": float("nan")}}, "finite"),
    ],
)
async def test_an_unfit_name_or_reward_fails_the_episode(service: Service, answer: dict[str, Any], says: str) -> None:
    def script(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
        return None if isinstance(message, protocol.Reset) else answer

    await service.join(script=script)
    job = await submit(service)
    view = await service.ends(job, "paused")
    assert says in view.reason and "\n" not in view.reason
    assert view.counters["episodes_failed"] > 0


async def test_a_reply_that_leaves_its_judge_no_room_counts_as_unjudged(service: Service) -> None:
    """With the reward that it has, 0."""

    def script(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
        if isinstance(message, protocol.Reset):
            return None
        if message.turn == 1:
            return {"done": True, "reward": 1.0, "metrics": {"unjudged": 0.0}}
        return {"messages": [user_message("x" * (600 if len(message.text) % 2 else 6))], "policy": "judge"}

    await service.worker().join()
    await service.host(owner=SERVICE, environments={"builtin:jsonl": True}, script=script).join()
    verifier = {"name": "judge", "policy": "judge"}
    rows = {"id": "jsonl", "rows": [{"prompt": str(number)} for number in range(9)], "verifier": verifier}
    job = await submit(service, environment=rows, policies={"main": {}, "judge": {"train": False, "base": True}})
    await service.ends(job)
    found = [(row.reward, row.metrics) for _, row in service.database.read(jobs.recent_episodes, "alice", job, 100)]
    assert (0.0, {"unjudged": 1.0}) in found and (1.0, {"unjudged": 0.0}) in found
    assert all(metrics == {"unjudged": 1.0 - reward} for reward, metrics in found if reward is not None)


async def test_a_policy_without_replies_gets_no_group(service: Service) -> None:
    """Half of the groups are played by the solver alone; the verifier's steps take the others."""

    def script(message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
        if isinstance(message, protocol.StepEpisode) and int(message.episode.split("-g")[1].split("-")[0]) % 2:
            return {"done": True, "reward": float(len(message.text) % 2)}
        return debate(message)

    await service.join(script=script)
    job = await submit(service, algorithm__max_staleness=4, stop__steps=2)
    await service.ends(job)
    assert [len(chain(service, job, name)) for name in PAIR] == [3, 3]
    verifier = service.database.read(jobs.get_policy, "alice", job, "verifier").id
    for row in service.groups(job):
        assert row["ordinal"] % 2 == 0 or verifier not in row["uses"]


@pytest.mark.parametrize(
    ("script", "most", "says"),
    [
        (lambda message: None, 8, "groups; name it in a Step"),
        (
            debate,
            1,
            "groups; give environment.max_turns more than 1, after which 2 of the last episodes ended; name it",
        ),
    ],
)
async def test_a_job_pauses_that_a_policy_has_no_part_in(service: Service, script: Any, most: int, says: str) -> None:
    await service.join(script=script)
    changes = {"algorithm": {"group_size": 2, "groups_per_step": 2}, "environment__max_turns": most}
    job = await submit(service, stop__steps=2, **changes)
    view = await service.ends(job, "paused")
    assert view.reason.startswith("the policy verifier had fewer than 2 episodes with a reply to train on in each")
    assert says in view.reason
    assert len(chain(service, job, "solver")) == 3, "the other went on to its end"
    assert all(row["state"] != "ready" for row in service.groups(job)), "nothing waits for a policy that trains no more"


def contents(service: Service, job: str) -> list[str]:
    """The newest version of each policy: a chain of everything that it was trained on."""
    return [service.artifacts.path(chain(service, job, name)[-1].hash, ADAPTER).read_text() for name in PAIR]


@pytest.mark.parametrize("after", [True, False])
async def test_a_crash_between_the_commits_of_two_policies_repeats_and_loses_nothing(
    tmp_path: Path, after: bool
) -> None:
    """The controller dies at one writer call after another, the call carried out or not: both chains are those of an
    undisturbed job."""
    calm = Service(tmp_path / "calm")
    await calm.start()
    await calm.worker(shortest=2).join()
    await calm.host(script=debate, environments={"task": True}).join()
    job = await submit(calm)
    await calm.ends(job)
    wanted = contents(calm, job)
    await calm.close()
    for moment in range(12, 90, 12 + after):
        service = Service(tmp_path / str(moment))
        await service.start()
        job = await submit(service, environment__return_timeout=5)
        await service.crash()
        await finish(service, job, calls=[moment], after=after, script=debate, environments={"task": True})
        assert contents(service, job) == wanted
        metrics = await service.controller.queries.metrics("alice", job)
        assert [row["step"] for row in metrics] == [1, 2, 3, 4]
        await service.close()


# --- pure -------------------------------------------------------------------------------------------------------------


def test_part_of_a_policy_has_its_tokens_alone() -> None:
    whole = Trajectory(prompt=[1, 2])
    whole.append_action(protocol.TokenLog([3, 4], [-1.0, -2.0], [0, 0]), "a")
    whole.append_observation([5])
    whole.append_action(protocol.TokenLog([6], [-3.0], [7]), "b")
    part = whole.of("b")
    assert (part.mask, part.logprobs, part.versions) == ([False] * 3 + [True], [0.0] * 3 + [-3.0], [-1] * 3 + [7])
    assert (part.prompt, part.tokens) == (whole.prompt, whole.tokens)


Said = tuple[str, list[int], list[float]]
"""The speaker of some tokens, or "" for the environment, the tokens and their log-probabilities."""


def spoken_group(random: Random, episodes: int = 4) -> list[tuple[list[Said], dict[str, float]]]:
    """Episodes of a solver, a verifier and the environment on one prompt, and the rewards."""

    def said(speaker: str) -> Said:
        length = random.randint(1, 9)
        return speaker, [random.randrange(99) for _ in range(length)], [-6.0 - random.random() for _ in range(length)]

    return [
        ([said(name) for name in ("solver", "", "verifier", "", "solver")],
         {"": random.random(), "solver": random.random(), "verifier": random.random()})
        for _ in range(episodes)
    ]  # fmt: skip


def as_played(parts: list[Said], rewards: dict[str, float], policies: Collection[str]) -> EpisodeResult:
    """The episode of a job with these policies, as the episode room builds it; the tokens of others are the
    environment's."""
    whole = Trajectory(prompt=[1, 2, 3])
    for speaker, tokens, logprobs in parts:
        if speaker in policies:
            whole.append_action(protocol.TokenLog(tokens, logprobs, [0] * len(tokens)), speaker)
        else:
            whole.append_observation(tokens)
    speakers = [speaker for speaker, _, _ in parts if speaker in policies]
    single = {name: reward for name, reward in rewards.items() if name in policies}
    return EpisodeResult([whole], [], [""] * len(speakers), rewards[""], {}, "done", {}, [], single, speakers)


def batch_of(spec: JobSpec, name: str, groups: list[list[EpisodeResult]]) -> protocol.TrainingBatch:
    policy: Any = SimpleNamespace(name=name, versions=SimpleNamespace(step_of=lambda version: version))
    job: Any = None
    buffer, complete = GroupBuffer(job, policy, Signal()), []
    for number, episodes in enumerate(groups):
        row = GroupRow(
            id=str(number), tenant="t", job="j", ordinal=number, prompt=b"", seed=0, created=0.0, episodes=()
        )
        complete.append(buffer.complete(row, {f"{number} {at}": one for at, one in enumerate(episodes)}))
    return make_batch(spec.of_policy(name), [one for one in complete if one is not None])


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_gradient_of_each_policy_is_that_of_a_run_split_by_hand(tmp_path: Path, algorithm: str) -> None:
    """By the real trainer on a small model: a job of two policies, and for each a job with that one alone, in which the
    other one is a part of the environment and its reward is not there."""
    random = Random(3)
    played = [spoken_group(random) for _ in range(3)]
    both = parse_job(job_of(policies=PAIR, algorithm__name=algorithm))
    gradients = []
    for rank, name in ((4, "solver"), (8, "verifier")):
        alone = parse_job(job_of(policies={name: PAIR[name]}, algorithm__name=algorithm))
        batches = [
            batch_of(both, name, [[as_played(*one, policies=PAIR) for one in group] for group in played]),
            batch_of(alone, name, [[as_played(*one, policies=[name]) for one in group] for group in played]),
        ]
        other = {"solver": "verifier", "verifier": "solver"}[name]
        swapped = [[(parts, {**rewards, name: rewards[other]}) for parts, rewards in group] for group in played]
        batches.append(
            batch_of(alone, name, [[as_played(*one, policies=[name]) for one in group] for group in swapped])
        )
        folder = adapter_folder(tmp_path / name, rank, 1)
        for batch in batches:
            real = trainer(decoder(), {"p": folder})
            real.forward_backward(forward_backward(), batch)
            finish_passes(real)
            gradients.append(gradient(real))
        ours, by_hand, of_another_reward = gradients[-3:]
        assert ours.any() and torch.equal(ours, by_hand)
        assert not torch.equal(ours, of_another_reward), "the test notices the reward of the partner"


GOLDEN = {
    "grpo": "adf9bdb05bd34c81003d76085ea11d87a75769469df0b76f1fbc51ee2c4c22f9",
    "rloo": "187c5c79bf660bb5843bca9ae3b7b1a535ee5fa4dca2fe9bcf6501177e8eb109",
    "dr_grpo": "549143ebb6ce81bd9b11fc3fd5a05147a9923c785c1eacf56466a5a1edda17d6",
}
"""SHA-256 of the encoded training batch of a job with one policy. It changes only with the algorithm itself."""


@pytest.mark.parametrize("algorithm", GOLDEN)
def test_batch_of_a_job_with_one_policy_is_bit_for_bit_as_it_was(algorithm: str) -> None:
    """Rewards that are sums of powers of two: their mean is exact on every machine."""
    random = Random(7)
    played = [
        [(parts, {"": random.randrange(8) / 4, "solver": random.randrange(8) / 4})
         for parts, _ in spoken_group(random)] for _ in range(3)
    ]  # fmt: skip
    spec = parse_job(job_of(policies={"solver": PAIR["solver"]}, algorithm__name=algorithm))
    batch = batch_of(spec, "solver", [[as_played(*one, policies=["solver"]) for one in group] for group in played])
    assert hashlib.sha256(protocol.encode(batch)).hexdigest() == GOLDEN[algorithm]


@pytest.mark.parametrize("trained", [0, 1, 2, 3])
def test_episodes_without_tokens_to_train_on_are_no_part_of_a_group(trained: int) -> None:
    """As those of an agent whose calls to one policy all change how it is sampled."""
    policy: Any = SimpleNamespace(name="a", versions=SimpleNamespace(step_of=lambda version: version))
    job: Any = None
    episodes = {}
    for number in range(3):
        whole = Trajectory(prompt=[1, 2])
        if number < trained:
            whole.append_action(protocol.TokenLog([3], [-1.0], [0]), "a")
        else:
            whole.append_observation([3])
        whole.append_action(protocol.TokenLog([4], [-1.0], [0]), "b")
        episodes[f"e{number}"] = EpisodeResult(
            [whole], [], ["x", "y"], 1.0, {}, "done", {}, [], {}, ["a", "b"]
        )  # fmt: skip
    group = GroupRow(id="g", tenant="t", job="j", ordinal=0, prompt=b"", seed=0, created=0.0, episodes=())
    part = GroupBuffer(job, policy, Signal()).complete(group, episodes)
    assert (part is not None) == (trained >= 2)
    assert part is None or part.names == [f"e{number}" for number in range(trained)]


@pytest.mark.parametrize(("fifo", "order"), [(False, ["old", "first", "new"]), (True, ["new", "old", "first"])])
def test_order_of_the_buffer(fifo: bool, order: list[str]) -> None:
    """By the oldest output token, those of version 0 included, or by arrival."""
    ready = [Group("new", 0, 2), Group("old", 2, 0), Group("first", 1, 1)]
    batch, stale = select_batch(ready, step=2, count=3, max_staleness=2, fifo=fifo)
    assert ([group.name for group in batch], stale) == (order, [])
    batch, stale = select_batch(ready, step=3, count=2, max_staleness=2, fifo=fifo)
    assert [group.name for group in stale] == ["old"]


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_that_no_group_reaches_drops_none_in_either_order(seed: int) -> None:
    """The order decides when a group is trained on, not whether."""
    random, arrived = Random(seed), [f"g{number}" for number in range(12)]
    taken: dict[bool, list[str]] = {}
    for fifo in (False, True):
        left, taken[fifo] = [Group(name, number, random.randrange(5)) for number, name in enumerate(arrived)], []
        for step in range(5, 9):
            batch, stale = select_batch(left, step=step, count=3, max_staleness=64, fifo=fifo)
            assert len(batch) == 3 and stale == []
            taken[fifo] += [group.name for group in batch]
            left = [group for group in left if group not in batch]
    assert taken[True] == arrived and sorted(taken[False]) == sorted(arrived)


@pytest.mark.parametrize(
    ("policies", "says"),
    [
        ({"a": {"train": False}}, "a frozen policy needs weights; give warm_start, base: true"),
        ({"a": {}, "b": {"train": False}}, "a frozen policy needs weights"),
        ({"a": {"base": True}}, "the base model is not trained"),
        ({"a": {"train": False, "base": True}}, "at least one policy with train: true"),
        ({"a": {}, "b": {"train": False, "base": True, "rank": 4}}, "rank: not with train: false, base: true"),
        ({"a": {}, "b": {"train": False, "base": True, "optimizer": {"lr": 0.1}}}, "optimizer: not with train: false"),
        ({"a": {}, "b": {"train": False, "base": True, "full": True}}, "full: not with train: false, base: true"),
        ({"a": {"follows": {"policy": "b", "every": 1}}, "b": {}}, "follows: a policy that follows another one is not"),
        ({"a": {}, "b": {"train": False, "base": True, **follows("a")}}, "base: not with follows"),
        ({"a": {}, "b": {"train": False, "warm_start": {"job": "x"}, **follows("a")}}, "warm_start: not with follows"),
        ({"a": {}, "b": {"train": False, "rank": 4, **follows("a")}}, "rank: not with train: false and follows"),
        ({"a": {}, "b": {"train": False, "seed": 4, **follows("a")}}, "seed: not with train: false and follows"),
        (
            {"a": {}, "b": {"train": False, **follows("c")}},
            "policies.b.follows.policy: given 'c', allowed: a policy that",
        ),
        (
            {"a": {}, "b": {"train": False, **follows("b")}},
            "policies.b.follows.policy: given 'b', allowed: a policy that",
        ),
        ({"a": {}, "b": {"train": False, "base_model": "x", **follows("a")}}, "base_model: not with train: false and"),
        ({"a": {"base_model": ""}}, "policies.a.base_model"),
        ({"a": {}, "b": {"train": False, **follows("a", 0)}}, "policies.b.follows.every"),
        ({"a": {}, "b": {"train": False, "follows": {"policy": "a"}}}, "policies.b.follows.every"),
        ({"a": {}, "b": {"algorithm": {"group_size": 4}}}, "group_size"),
        ({"a": {}, "b": {"algorithm": {"loss": "cross_entropy", "kl_weight": 1}}}, "policies.b.algorithm: "),
        ({"a": {}, "b c": {}}, "policy name"),
    ],
)
def test_unfit_policies_are_refused_in_one_line(policies: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(job_of(policies=policies))
    assert all("\n" not in problem for problem in refused.value.problems)
    assert says in str(refused.value)


def test_a_judge_is_another_policy_of_the_job() -> None:
    rows: dict[str, Any] = {"id": "jsonl", "rows": [{"prompt": "x"}], "verifier": {"name": "judge", "policy": "judge"}}
    judge = {"train": False, "base": True}
    spec = parse_job(job_of(environment=rows, policies={"main": {}, "judge": judge}))
    assert spec.environment.turns == 2
    for policies, says in (
        ({"main": {}}, "no policy 'judge'"),
        ({"judge": judge, "main": {}}, "the first policy, which gives the reply"),
    ):
        with pytest.raises(SpecError, match=says):
            parse_job(job_of(environment=rows, policies=policies))
    for given in ("j" * 1_000_000, ["judge"] * 1000, "main\n"):
        rows["verifier"]["policy"] = given
        with pytest.raises(SpecError, match="no policy") as refused:
            parse_job(job_of(environment=rows, policies={"main": {}, "judge": judge}))
        assert str(refused.value).isprintable() and len(str(refused.value)) < 300


def test_a_policy_sees_the_job_with_its_fields() -> None:
    own = {"algorithm": {"groups_per_step": 3, "loss": "ppo"}, "sampling": {"temperature": 0.5}, "stop": {"steps": 9}}
    spec = parse_job(job_of(policies={"a": {}, "b": own}, algorithm__max_staleness=3))
    a, b = spec.of_policy("a"), spec.of_policy("b")
    assert (a.algorithm, a.sampling, a.stop) == (spec.algorithm, spec.sampling, spec.stop)
    assert (b.algorithm.groups_per_step, b.algorithm.loss.name, b.algorithm.max_staleness) == (3, "ppo", 3)
    assert (b.sampling.temperature, b.sampling.max_tokens, b.stop.steps) == (0.5, 8, 9)
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
