"""The pure decisions: routes, staleness, failures, job_rules."""

from __future__ import annotations

from collections import deque
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.replies import Group

from rookery.scheduling import job_rules, trainers
from rookery.scheduling.job_rules import FailureRateMonitor, admission_budget, select_batch

# --- routes -----------------------------------------------------------------------------------------------------------


def test_a_policy_goes_to_the_trainer_with_the_least_load() -> None:
    assert trainers.assign_trainer({}) is None
    assert trainers.assign_trainer({"b": 1, "a": 1, "c": 2}) == "a"
    assert trainers.assign_trainer({"b": 0, "a": 1}) == "b"
    assert trainers.assign_trainer({"b": 1, "a": 1}, offloaded_at="b") == "b"
    assert trainers.assign_trainer({"b": 2, "a": 1}, offloaded_at="b") == "a"
    assert trainers.assign_trainer({"b": 3.1, "a": 3}, 2.0, offloaded_at="b") == "b", "a reload is worth more"
    assert not trainers.is_overloaded({"a": 0.0, "b": 0.0}, "a", 0.0)


def test_a_training_worker_is_crowded_where_a_move_makes_it_even() -> None:
    assert trainers.is_overloaded({"a": 2, "b": 0}, "a")
    assert trainers.is_overloaded({"a": 5, "b": 4, "c": 3}, "a")
    assert not trainers.is_overloaded({"a": 5, "b": 4, "c": 3}, "b")
    assert not trainers.is_overloaded({"a": 1, "b": 0}, "a")
    assert not trainers.is_overloaded({"b": 0}, "a"), "it takes no policies at all now"


def test_a_policy_trains_where_it_ends_first() -> None:
    speeds = {"slow": 0.25, "quick": 4.0}
    assert trainers.assign_trainer({"slow": 0.0, "quick": 0.0, "unknown": 0.0}, 1.0, speeds=speeds) == "quick"
    assert trainers.assign_trainer({"slow": 0.0, "quick": 20.0, "unknown": 0.0}, 1.0, speeds=speeds) == "unknown"
    assert trainers.assign_trainer({"slow": 0.0, "quick": 20.0}, 1.0, speeds=speeds) == "slow"
    assert trainers.assign_trainer({"slow": 0.0, "quick": 1.0}, 1.0, "slow", speeds) == "quick", "worth a reload"
    assert trainers.is_overloaded({"slow": 1.0, "quick": 13.0}, "slow", 1.0, speeds)
    assert not trainers.is_overloaded({"slow": 1.0, "quick": 14.0}, "slow", 1.0, speeds)
    assert not trainers.is_overloaded({"slow": 0.0, "quick": 1.0}, "quick", 1.0, speeds)
    assert trainers.select_helpers({"slow": 0.0, "quick": 8.0, "unknown": 0.0}, 2, 1.0, speeds) == ["unknown", "quick"]


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.lists(st.floats(0.05, 20), min_size=2, max_size=5)
)  # fmt: skip
def test_policies_with_constant_loads_settle(loads: list[float], quick: list[float]) -> None:
    """Each move gives its policy to a worker that ends sooner, and after few moves none would."""
    at, workers = dict.fromkeys(range(len(loads)), "w0"), len(quick)
    speeds = {f"w{number}": speed for number, speed in enumerate(quick)}

    def load() -> dict[str, float]:
        return {f"w{w}": sum(loads[p] for p in at if at[p] == f"w{w}") for w in range(workers)}

    moves = 0
    while moving := [p for p in at if trainers.is_overloaded(load(), at[p], loads[p], speeds)]:
        policy, before = moving[0], load()[at[moving[0]]] / speeds[at[moving[0]]]
        at[policy] = "none"
        at[policy] = trainers.assign_trainer(load(), loads[policy], speeds=speeds) or ""
        assert load()[at[policy]] / speeds[at[policy]] < before
        moves += 1
        assert moves <= 10 * len(loads)


def test_load_is_recent_training_time() -> None:
    load, hour = trainers.TrainingLoad(), 3600.0
    assert load.of(["new"], 0.0) == {"new": 1.0}
    load.add("small", 1.0, hour)
    load.add("large", 3.0, hour)
    assert load.of(["small", "large", "new"], hour) == {"small": 1.0, "large": 3.0, "new": 2.0}
    load.add("large", 1.0, hour + trainers.HALF_LIFE_SECONDS)
    later = load.of(["small", "large"], hour + trainers.HALF_LIFE_SECONDS)
    assert later == {"small": 0.5, "large": 2.5}
    load.forget("large")
    assert load.of(["large"], hour) == {"large": 1.0}


def test_helpers_are_the_workers_with_the_least_load() -> None:
    assert trainers.select_helpers({"c": 1, "b": 0, "a": 1, "d": 4}, 3) == ["b", "a", "c"]
    assert trainers.select_helpers({"a": 1}, 3) == ["a"]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=30), st.integers(1, 10))
def test_shares_are_consecutive_and_about_equal(sizes: list[float], parts: int) -> None:
    shares = trainers.divide(sizes, parts)
    assert [i for share in shares for i in range(share.start, share.stop)] == list(range(len(sizes)))
    assert 1 <= len(shares) <= parts and all(share.stop > share.start for share in shares)
    assert all(sum(sizes[share]) <= sum(sizes) / parts + max(sizes) for share in shares)


# --- staleness --------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 2**32),
    per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    every=st.integers(1, 5),
    failures=st.floats(0, 0.3),
)
def test_no_group_is_ever_trained_beyond_the_bound(
    seed: int, per_step: int, max_staleness: int, every: int, failures: float
) -> None:
    """Groups start, end in any order and fail, steps are taken and commits come late: the job goes on, and what it
    trains on is never too old."""
    every = min(every, max_staleness + 1)  # as the specification demands
    random = Random(seed)
    step = durable = 0
    training: list[Group] | None = None
    running: list[Group] = []
    ready: list[Group] = []
    ordinal = dropped = 0
    for _ in range(600):
        free = admission_budget(
            step=step + (training is not None),
            durable_step=durable,
            in_flight=len(running),
            ready=len(ready),
            per_step=per_step,
            max_staleness=max_staleness,
        )
        assert free >= 0
        for _ in range(random.randint(0, free)):
            running.append(Group(str(ordinal), ordinal, durable))
            ordinal += 1
        moves = ["end"] * bool(running) + ["train"] * (training is None) + ["step"] * (training is not None)
        match random.choice(moves):
            case "end":
                group = running.pop(random.randrange(len(running)))
                if random.random() >= failures:
                    ready.append(group)
            case "train":
                batch, stale = select_batch(ready, step=step, count=per_step, max_staleness=max_staleness)
                assert len(batch) in (0, per_step)
                ready = [group for group in ready if group not in stale and group not in batch]
                dropped += len(stale)
                assert all(step - group.step <= max_staleness for group in batch)
                assert all(step - group.step > max_staleness for group in stale)
                if batch and ready:  # what expires first went first
                    assert max(g.step for g in batch) <= min(g.step for g in ready)
                training = batch or None
            case "step":
                training = None
                step += 1
                if step % every == 0:
                    durable = step
    assert step >= 20, "it never stands still"
    if failures == 0:
        assert dropped == 0 or max_staleness > 0


def test_strict_mode_runs_one_steps_groups_at_a_time() -> None:
    room = {"per_step": 4, "max_staleness": 0}
    assert admission_budget(step=0, durable_step=0, in_flight=0, ready=0, **room) == 4
    assert admission_budget(step=0, durable_step=0, in_flight=3, ready=1, **room) == 0
    assert admission_budget(step=1, durable_step=0, in_flight=0, ready=0, **room) == 0, "training: nothing new yet"
    assert admission_budget(step=0, durable_step=0, in_flight=0, ready=0, per_step=4, max_staleness=2) == 12


# --- failures ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["", "", "boom", "late"]), max_size=60), st.integers(2, 20), st.floats(0.1, 1))
def test_the_pause_reason_is_that_of_the_window(ends: list[str], window: int, share: float) -> None:
    failures = FailureRateMonitor(window, share)
    seen: deque[str] = deque(maxlen=window)
    for end in ends:
        failures.add(end)
        seen.append(end)
        bad = [error for error in seen if error]
        expected = len(seen) >= window // 2 and len(bad) > share * len(seen)
        assert (failures.pause_reason is not None) == expected
        if expected:
            assert f"{len(bad)} of the last {len(seen)}" in str(failures.pause_reason)
            assert max(bad.count(error) for error in bad) == bad.count(str(failures.pause_reason).rpartition(": ")[2])


# --- retention --------------------------------------------------------------------------------------------------------

scores = st.one_of(st.none(), st.floats(-1, 1))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.integers(1, 5))
def test_the_version_that_earned_the_best_reward_stays_until_a_better_one(means: list[float], keep_last: int) -> None:
    """Version v samples a mean of ``means[v]``, which is first known when version v + 1 was made of it."""
    kept: list[int] = []
    for newest in range(len(means)):
        kept.append(newest)
        rewards = job_rules.training_rewards([(None, None), *((v - 1, means[v - 1]) for v in range(1, newest + 1))])
        scores = {version: rewards.get(version) for version in kept}
        going = job_rules.versions_to_delete(scores, keep_last=keep_last, keep_best=True)
        kept = [version for version in kept if version not in going]
        if newest:
            assert max(means[version] for version in kept if version < newest) == max(means[:newest])


def test_a_version_is_judged_by_its_samples_also_after_a_lost_one() -> None:
    """Version 2 was made of version 1's episodes and lost; version 3 was trained from version 1 again."""
    assert job_rules.training_rewards([(None, None), (0, 0.1), (1, 0.9), (1, 0.8), (3, 0.2)]) == {
        0: 0.1,
        1: 0.8,
        3: 0.2,
    }


@given(
    st.dictionaries(st.integers(0, 30), scores, min_size=1),
    st.integers(1, 5),
    st.booleans(),
    st.sets(st.integers(0, 30)),
)
def test_the_head_the_last_the_best_and_the_used_stay(
    versions: dict[int, float | None], keep_last: int, keep_best: bool, in_use: set[int]
) -> None:
    going = job_rules.versions_to_delete(versions, keep_last=keep_last, keep_best=keep_best, in_use=in_use)
    assert going == sorted(going)
    stay = set(versions) - set(going)
    newest = sorted(versions)[-keep_last:]
    assert stay >= set(newest) | (in_use & set(versions))
    scored = {version: score for version, score in versions.items() if score is not None}
    best = [version for version, score in scored.items() if score == max(scored.values())]
    if keep_best and scored:
        assert max(best) in stay
    assert len(stay - set(newest) - in_use) <= (1 if keep_best else 0)
