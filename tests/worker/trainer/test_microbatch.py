"""Training that starts while a step's rollouts still run: the same gradient, the same promises.

On a small random model in float32, portioned gradients agree with whole ones within 2e-5 of their largest entry and
steps within 2e-6 (sums in another order, and the normalisation applied at another place).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.peers import ADAPTER, HANG, ScriptedHost, Service, eventually, job_of, settle
from tests.support.replies import Group
from tests.worker.trainer.test_trainer import adapter_folder, close, decoder, finish, gradient, masters, optim, trainer
from tests.worker.trainer.test_trainer import forward_backward as operation

from rookery import protocol
from rookery.controller.jobs.step import CompleteGroup, StepAccumulator, adam, forward_backward, make_batch
from rookery.controller.jobs.trajectory import EpisodeResult, Trajectory
from rookery.scheduling.job_rules import select_batch
from rookery.spec.job import JobSpec
from rookery.worker.trainer.packing import PackedGroup

# --- the batch --------------------------------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False))
def test_packed_group_has_the_tokens_with_a_weight(rng: Random) -> None:
    """Of each member up to its last one; the token before it predicts it, and the prompt's last a member's first."""
    prompt = [rng.randrange(99) for _ in range(rng.randint(1, 4))]
    members = []
    for _ in range(rng.randint(0, 4)):
        length = rng.randint(0, 6)
        columns = [[rng.choice([0.0, 1e-50, 1e300, -2.5]) for _ in range(length)] for _ in range(3)]
        tokens = [rng.randrange(99) for _ in range(length)]
        members.append(
            protocol.GroupMember(tokens=tokens, logprobs=columns[0], advantages=columns[1], weights=columns[2])
        )
    packed = PackedGroup.from_group(protocol.SharedPrefixGroup(prompt=prompt, members=members))
    expected, tails, read = [], [], list(prompt)
    for number, member in enumerate(members):
        found = [i for i, weight in enumerate(member.weights) if weight]
        for i in found:
            source = len(read) + i - 1 if i else len(prompt) - 1
            values = (member.logprobs[i], member.advantages[i], member.weights[i])
            expected.append((source, member.tokens[i], *torch.tensor(values).tolist(), number))
        tails += [member.tokens[: found[-1]]] if found else []
        read += tails[-1] if found else []
    loss = packed.loss
    columns = (loss.sources, loss.targets, loss.logprobs, loss.advantages, loss.weights, loss.members)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert (packed.prompt, packed.tails) == (prompt, tails)
    packed.check(99, 99, 99)
    for bound in {*read, *(target for _, target, *_ in expected)}:
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            packed.check(99, bound, 99)


# --- the gradient -----------------------------------------------------------------------------------------------------


def spec(**algorithm: Any) -> JobSpec:
    return JobSpec.model_validate(
        job_of(
            algorithm={"group_size": 3, "groups_per_step": 4, **algorithm},
            policies={"main": {"optimizer": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "grad_clip": 1.0}}},
        )
    )


def group(rng: Random, number: int) -> CompleteGroup:
    """Three episodes of one or two trajectories, of unlike lengths, with an environment's token here and there."""
    prompt = [rng.randrange(173) for _ in range(rng.randint(2, 9))]

    def trajectory(prompt: list[int]) -> Trajectory:
        made = Trajectory(prompt=list(prompt))
        for _ in range(rng.randint(1, 3)):
            said = [rng.randrange(173) for _ in range(rng.randint(1, 7))]
            made.append_action(protocol.TokenLog(said, [-4.0 - rng.random() for _ in said], [0] * len(said)), "main")
            made.append_observation([rng.randrange(173)])
        return made

    outcomes = [
        EpisodeResult([trajectory(prompt) for _ in range(rng.randint(1, 2))], [], [], rng.gauss(0, 1), {}, "done")
        for _ in range(3)
    ]
    return CompleteGroup(f"g{number}", number, 0, 0, outcomes)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "mean"])
def test_step_in_micro_batches_equals_the_whole_step(tmp_path: Path, name: str) -> None:
    """Also where the portions come in another order; and the loss that is shown is that of the whole."""
    job = spec(name=name, kl_weight=0.3)
    groups = [group(Random(seed), seed) for seed in range(4)]
    base, folder = decoder(), adapter_folder(tmp_path / "p", 4, 1)
    gradients, steps, losses = [], [], []
    for portions in ([groups], [groups[2:], groups[:1], groups[1:2]], [[one] for one in groups]):
        at, step = trainer(base, {"p": folder}), StepAccumulator(job, 0)
        for number, portion in enumerate(portions):
            entry = forward_backward(job, portion)
            step.groups.extend(portion)
            op = operation(operations=number, loss=entry.loss, kl_weight=entry.kl_weight, temperature=entry.temperature)
            at.forward_backward(op, protocol.decode(protocol.batches, entry.batch))
            step.add(finish(at)["fb"].metrics)
        assert step.missing == 0
        gradients.append(gradient(at) * step.scale)
        at.optim_step(optim(adam=adam(job, 0), scale=step.scale, operations=len(portions)))
        metrics = finish(at)["opt"].metrics
        assert metrics["grad_norm"] == pytest.approx(float(gradients[-1].norm()), rel=1e-5)
        steps.append(masters(at))
        losses.append(step.trainer_metrics())
    for portioned, stepped, sums in zip(gradients[1:], steps[1:], losses[1:], strict=True):
        close(portioned, gradients[0])
        assert (stepped - steps[0]).abs().max() < 2e-6
        assert sums["tokens"] == losses[0]["tokens"]
        for figure in ("loss:sum", "kl:sum", "entropy:sum", "ratio:sum", "logp_diff:max"):
            assert sums[figure] == pytest.approx(losses[0][figure], rel=1e-4, abs=1e-5), figure


def test_gradient_of_each_policy_is_that_of_a_job_split_by_hand(tmp_path: Path) -> None:
    """Two policies in one conversation, against groups in which the other's tokens are the environment's."""
    rng, base = Random(5), decoder()
    names = {"a": adapter_folder(tmp_path / "a", 4, 1), "b": adapter_folder(tmp_path / "b", 2, 2)}
    played: list[EpisodeResult] = []
    by_hand: dict[str, list[EpisodeResult]] = {"a": [], "b": []}
    prompt = [rng.randrange(173) for _ in range(6)]
    for _ in range(4):
        whole = Trajectory(prompt=list(prompt))
        split = {name: Trajectory(prompt=list(prompt)) for name in names}
        for speaker in "abab":
            tokens = [rng.randrange(173) for _ in range(rng.randint(1, 6))]
            logprobs = [-4.0 - rng.random() for _ in tokens]
            whole.append_action(protocol.TokenLog(tokens, logprobs, [0] * len(tokens)), speaker)
            for name, part in split.items():
                if name == speaker:
                    part.append_action(protocol.TokenLog(tokens, logprobs, [0] * len(tokens)), speaker)
                else:
                    part.append_observation(tokens)
        rewards = {name: rng.gauss(0, 1) for name in names}
        played.append(EpisodeResult([whole], [], [*"abab"], 0.5, {}, "done", rewards=rewards, speakers=[*"abab"]))
        for name in names:
            by_hand[name].append(EpisodeResult([split[name]], [], ["", ""], 0.5 + rewards[name], {}, "done"))
    for name, folder in names.items():
        gradients = []
        for episodes in ([part for one in played if (part := one.of(name)) is not None], by_hand[name]):
            at = trainer(base, {"p": folder})
            entry = forward_backward(spec(), [CompleteGroup("g", 0, 0, 0, episodes)])
            at.forward_backward(operation(loss=entry.loss), protocol.decode(protocol.batches, entry.batch))
            assert finish(at)["fb"].metrics["tokens"] == sum(episode.num_action_tokens for episode in episodes)
            gradients.append(gradient(at))
        assert torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize(
    ("algorithm", "sent"), [({}, False), ({"kl_weight": 0.1}, True), ({"loss": {"name": "dro", "beta": 0.1}}, True)]
)
def test_tokens_without_advantage_are_sent_if_another_term_needs_them(algorithm: dict[str, Any], sent: bool) -> None:
    even = group(Random(1), 1)
    for outcome in even.episodes:
        outcome.reward = 1.0
    uneven = group(Random(2), 2)
    for outcome, reward in zip(uneven.episodes, (0.0, 0.5, 1.0), strict=True):
        outcome.reward = reward
    batch = make_batch(spec(**algorithm), [even, uneven])
    members = [member for unit in batch.groups for member in unit.members]
    trajectories = [t for one in (even, uneven) for outcome in one.episodes for t in outcome.trajectories]
    assert len(members) == (len(trajectories) if sent else sum(any(m.advantages) for m in members))
    assert len(members) >= 2


@pytest.mark.parametrize("scale", [0.125, 1.0, 3.0])
def test_scale_is_applied_before_clipping(tmp_path: Path, scale: float) -> None:
    """The bound lies at the unscaled gradient's norm: what is scaled up is clipped, what is scaled down is not."""
    folder = adapter_folder(tmp_path / "p", 4, 1)
    job, groups = spec(), [group(Random(1), 1)]
    batch = protocol.decode(protocol.batches, forward_backward(job, groups).batch)
    scaled, weighed = trainer(decoder(), {"p": folder}), trainer(decoder(), {"p": folder})
    scaled.forward_backward(operation(), batch)
    for unit in batch.groups:
        for member in unit.members:
            member.weights = [scale * weight for weight in member.weights]
    weighed.forward_backward(operation(), batch)
    finish(scaled), finish(weighed)
    bound = protocol.Adam(lr=1e-2, eps=10.0, clip=float(gradient(scaled).norm()))  # of eps, as a step forgets the scale
    for at, factor in ((scaled, scale), (weighed, 1.0)):
        before = masters(at)
        at.optim_step(optim(adam=bound, scale=factor))
        assert finish(at)["opt"].metrics["skipped"] == 0
    assert (masters(weighed) - before).abs().max() > 2e-5
    assert (masters(scaled) - masters(weighed)).abs().max() < 2e-6


# --- which groups -----------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(2, 5)), max_size=12), st.integers(1, 8), st.integers(0, 30),
    st.integers(0, 3),
)  # fmt: skip
def test_micro_batches_take_the_oldest_admissible_groups(
    given: list[tuple[int, int]], count: int, enough: int, max_staleness: int
) -> None:
    ready = [Group(str(i), i, step, responses) for i, (step, responses) in enumerate(given)]
    batch, stale = select_batch(ready, step=6, count=count, max_staleness=max_staleness, enough=enough)
    fresh = [group for group in ready if 6 - group.step <= max_staleness]
    assert sorted(stale + fresh, key=lambda g: g.ordinal) == ready
    assert batch == sorted(fresh, key=lambda g: (g.step, g.ordinal))[: len(batch)]
    assert len(batch) <= count
    if batch and len(batch) < count:
        assert 0 < enough <= sum(group.responses for group in batch)
    if not batch and fresh:
        assert len(fresh) < count, "the rest of a step never waits for more"
        assert not enough or sum(group.responses for group in fresh) < enough


# --- a job ------------------------------------------------------------------------------------------------------------


def in_portions(**changes: Any) -> dict[str, Any]:
    return job_of(**{"algorithm": {"group_size": 2, "groups_per_step": 4, "micro_batch": 2}, **changes})


def head(service: Service, job: str) -> str:
    """The newest version's content: a chain of all gradients, each a sum that has no order."""
    return service.artifacts.path(service.check_history(job)[-1].hash, ADAPTER).read_text()


class Slow:
    """A host's script that answers the groups ``held`` (by their numbers) when it is told to. Rewards are the members'
    numbers: every group has something to learn."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def __call__(self, message: protocol.Reset | protocol.StepEpisode) -> Any:
        if isinstance(message, protocol.Reset):
            return None
        ordinal, _, member = message.episode.rpartition("-g")[2].partition("-")
        return HANG if ordinal in self.held else {"reward": float(member), "done": True}


async def let_go(host: ScriptedHost, slow: Slow) -> None:
    """Have the host come back and answer what it had not."""
    slow.held.clear()
    await host.leave()
    await host.join()


async def test_training_starts_while_rollouts_run(service: Service) -> None:
    worker = await service.worker().join()
    slow = Slow()
    slow.held = {"0", "1"}
    host = await service.host(script=slow).join()
    view, _ = await service.controller.submit("alice", in_portions(stop__steps=1))

    def trained() -> int:
        return sum(isinstance(op, protocol.ForwardBackward) for op in worker.operations)

    await eventually(lambda: sum(len(batch.groups) for batch in worker.batches.values()) == 2)
    before = trained()
    shown = await service.controller.queries.show("alice", view.id)
    assert (shown.groups_in_flight, shown.groups_ready, shown.step) == (2, 0, 0)
    assert not any(isinstance(op, protocol.OptimStep) for op in worker.operations)
    await let_go(host, slow)
    await service.ends(view.id)
    service.check_history(view.id)
    assert before >= 1
    passes = [op.operations for op in worker.operations if isinstance(op, protocol.ForwardBackward)]
    assert passes == list(range(trained()))
    (step,) = [op for op in worker.operations if isinstance(op, protocol.OptimStep)]
    assert step.operations == trained()
    assert step.scale == pytest.approx(1 / 8)
    (row,) = await service.controller.queries.metrics("alice", view.id)
    assert (row["groups"], row["episodes"]) == (4, 8)
    assert row["loss"] == pytest.approx(trained() / 8), "the sum of the portions' losses, scaled as the step was"


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 8])
async def test_history_equals_that_of_whole_steps(tmp_path: Path, micro_batch: int) -> None:
    contents = set()
    for size in (0, micro_batch):
        service = Service(tmp_path / str(size))
        await service.start()
        await service.join()
        view, _ = await service.controller.submit("alice", in_portions(algorithm__micro_batch=size, stop__steps=3))
        await service.ends(view.id)
        contents.add(head(service, view.id))
        assert all(row["min_version"] == row["consumed_by"] - 1 for row in service.groups(view.id))
        await service.close()
    assert len(contents) == 1


@pytest.mark.parametrize("death", range(1, 7))
async def test_worker_lost_between_micro_batches_costs_only_its_work(tmp_path: Path, death: int) -> None:
    """It dies as it is given its operation number ``death`` after the first version; another one computes all again."""
    contents = []
    for dies in (False, True):
        service = Service(tmp_path / str(dies))
        await service.start()
        first = await service.worker("a").join()
        await service.worker("b").join()
        await service.host().join()
        received = 0

        async def die(op: Any, first: Any = first, dies: bool = dies) -> None:
            nonlocal received
            received += not isinstance(op, protocol.InitAdapter)
            if dies and received == death and first.link is not None:
                first.link.cut()

        first.answer = die
        view, _ = await service.controller.submit("alice", in_portions(stop__steps=2))
        await service.ends(view.id)
        contents.append(head(service, view.id))
        rows = service.groups(view.id)
        assert Counter(row["consumed_by"] for row in rows if row["state"] == "consumed") == {1: 4, 2: 4}
        await service.close()
    assert contents[0] == contents[1]


async def test_controller_killed_between_micro_batches_repeats_them(tmp_path: Path) -> None:
    """Whatever was differentiated, no group is consumed before the commit: each trains once."""
    calm = Service(tmp_path / "calm")
    await calm.start()
    await calm.worker().join()
    await calm.host(script=Slow(), environments={"task": True}).join()
    view, _ = await calm.controller.submit("alice", in_portions(stop__steps=2))
    await calm.ends(view.id)
    wanted = head(calm, view.id)
    await calm.close()

    service = Service(tmp_path / "rough")
    await service.start()
    worker = await service.worker().join()
    slow = Slow()
    slow.held = {"3"}
    await service.host(script=slow, environments={"task": True}).join()
    view, _ = await service.controller.submit("alice", in_portions(stop__steps=2, environment__return_timeout=5))
    await eventually(lambda: sum(len(batch.groups) for batch in worker.batches.values()) == 3)
    assert {row["state"] for row in service.groups(view.id)} == {"ready", "open"}
    await service.crash()
    await service.start()
    await service.worker("next").join()
    await service.host(script=Slow(), instance="host-2", environments={"task": True}).join()
    await service.ends(view.id)
    assert head(service, view.id) == wanted
    rows = service.groups(view.id)
    assert Counter(row["consumed_by"] for row in rows) == {1: 4, 2: 4}
    await service.close()


async def test_groups_in_micro_batches_keep_the_staleness_bound(service: Service) -> None:
    worker = await service.worker().join()
    slow = Slow()
    slow.held = {"0"}
    host = await service.host(script=slow).join()
    view, _ = await service.controller.submit(
        "alice", in_portions(stop__steps=5, algorithm__max_staleness=1, algorithm__groups_per_step=2)
    )
    await eventually(lambda: sum(isinstance(op, protocol.OptimStep) for op in worker.operations) >= 1)
    await settle(1)
    await let_go(host, slow)
    await service.ends(view.id)
    service.check_history(view.id)
    for row in service.groups(view.id):
        if row["state"] == "consumed":
            assert row["consumed_by"] - 1 - row["min_version"] <= 1
    consumed = Counter(row["consumed_by"] for row in service.groups(view.id) if row["state"] == "consumed")
    assert consumed == dict.fromkeys(range(1, 6), 2)


async def test_groups_without_variance_and_failed_members(service: Service) -> None:
    """Portions that carry nothing count; a step waits for whole groups, and portions count survivors alone."""
    worker = await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode):
            failed = message.episode.endswith("-2")
            return {"error": "no"} if failed else {"reward": 1.0, "done": True}
        return None

    await service.host(script=script).join()
    view, _ = await service.controller.submit(
        "alice", in_portions(algorithm__group_size=3, algorithm__micro_batch=4, stop__steps=2)
    )
    shown = await service.ends(view.id)
    assert shown.counters["zero_variance_groups"] == 8
    assert shown.counters["episodes_failed"] == 8
    assert all(not batch.groups for batch in worker.batches.values())
    assert {op.scale for op in worker.operations if isinstance(op, protocol.OptimStep)} == {1 / 8}
    assert all(row["zero_variance_share"] == 1 for row in await service.controller.queries.metrics("alice", view.id))


@pytest.mark.parametrize(
    ("stop", "says"), [({"reward": -1.0}, "reward"), ({"tokens": 1}, "tokens reached 1"), ({"steps": 1}, "1 step")]
)
async def test_a_job_stops_after_whole_steps_only(service: Service, stop: dict[str, Any], says: str) -> None:
    await service.join()
    view, _ = await service.controller.submit("alice", in_portions(stop=stop))
    shown = await service.ends(view.id)
    assert says in shown.reason
    assert shown.step == 1
    assert Counter(row["consumed_by"] for row in service.groups(view.id) if row["state"] == "consumed") == {1: 4}


async def test_time_that_is_over_in_the_middle_of_a_step_drops_its_portions(service: Service) -> None:
    worker = await service.worker().join()
    slow = Slow()
    slow.held = {"0"}
    await service.host(script=slow).join()
    view, _ = await service.controller.submit("alice", in_portions(stop={"wall_time": 50}))
    await eventually(lambda: sum(len(batch.groups) for batch in worker.batches.values()) == 3)
    await service.clock.advance(60)
    shown = await service.ends(view.id)
    assert shown.reason.startswith("wall time")
    assert shown.step == 0
    assert not any(row["state"] == "consumed" for row in service.groups(view.id))
    assert not any(isinstance(op, protocol.OptimStep) for op in worker.operations)
