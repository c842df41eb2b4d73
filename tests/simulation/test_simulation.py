"""The simulator: its models, its promises (same seed, same run; a mode differs in one part only), its refusals."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.rules import split

from rookery import protocol
from rookery.cli import main
from rookery.controller.offload.seeding import Seeding
from rookery.errors import UserError
from rookery.scheduling.offload import Cycle
from rookery.simulation.clock import Deadlock, run
from rookery.simulation.fakes.compute import FakeCompute
from rookery.simulation.fakes.engine import FakeEngine, Row
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService
from rookery.simulation.fakes.text import LongTailed, chat, logprobs_of, tokens_of
from rookery.simulation.fakes.trainer import FakeTrainer
from rookery.simulation.profiles import Profile, load_profile, packaged
from rookery.simulation.replay import MODES, ReplayResult, Scenario, balanced, parse_modes, replay
from rookery.simulation.report import as_json
from rookery.simulation.traces import HOUR, Trace, load_trace, parse
from rookery.spec.machine import Machine

# --- clock ------------------------------------------------------------------------------------------------------------


def test_time_jumps_from_timer_to_timer() -> None:
    async def nap() -> list[float]:
        loop, woke = asyncio.get_running_loop(), []

        async def sleeper(seconds: float) -> None:
            await asyncio.sleep(seconds)
            woke.append(loop.time())

        await asyncio.gather(sleeper(86400.0), sleeper(0.25), sleeper(3600.0))
        return woke

    assert run(nap()) == [0.25, 3600.0, 86400.0]


def test_deadlock_is_raised() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(stuck())


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "hours", "most"), [("calm", 4, 8), ("bursty", 4, 8), ("diurnal", 24, 8)])
def test_packaged_traces(name: str, hours: float, most: int) -> None:
    trace = load_trace(name)
    assert (trace.name, trace.seconds) == (name, hours * HOUR)
    assert max(count for _, count in trace.changes) == most


@given(
    gaps=st.lists(st.integers(1, 10_000), min_size=1, max_size=20),
    counts=st.lists(st.integers(0, 50), min_size=20, max_size=20),
    share=st.floats(0.01, 3.0),
)
def test_a_trace_is_read_cut_and_sped_up(gaps: list[int], counts: list[int], share: float) -> None:
    def at(trace: Trace, time: float) -> int:
        return next(count for since, count in reversed(trace.changes) if since <= time)

    times = [float(sum(gaps[:at])) for at in range(len(gaps))]
    text = "time,instances\n" + "".join(f"{time},{count}\n" for time, count in zip(times, counts, strict=False))
    trace = parse(text + f"{sum(gaps)},0\n", "drawn")
    assert trace.changes[0][0] == 0 and trace.seconds == sum(gaps)
    piece = trace.cut(trace.seconds * share)
    for part in (0.0, 0.3, 0.9):
        time = part * piece.seconds
        assert at(piece, time) == at(trace, time % trace.seconds)
        assert at(trace.faster(4), time / 4 % (trace.seconds / 4)) == pytest.approx(
            at(trace, time % trace.seconds), abs=50
        )
    assert trace.faster(4).mean() == pytest.approx(trace.mean())
    assert min(counts) <= trace.mean() <= max(counts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "needs two lines"),
        ("when,many\n0,1\n", "line 1: given 'when,many', allowed: the header time,instances"),
        ("time,instances\n0,1\n", "needs two lines"),
        ("# c\ntime,instances\n5,1\n9,1\n", "line 3: time: given 5, allowed: 0 on the first line"),
        ("time,instances\n0,1\n9,1\n9,2\n", "line 4: time: given 9, allowed: more than 9"),
        ("time,instances\n0,1\nnan,2\n", "line 3: time: given nan"),
        ("time,instances\n0,-1\n9,1\n", "line 2: instances: given -1, allowed: 0 to"),
        ("time,instances\n0,1.5\n9,1\n", "line 2: given '0,1.5', allowed: seconds and a whole number"),
        ("time,instances\n0,1,2\n9,1\n", "line 2: given '0,1,2', allowed: seconds and a whole number"),
    ],
)
def test_invalid_trace_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(text, "mine")
    assert problem in str(refused.value) and "\n" not in str(refused.value)


# --- machines ---------------------------------------------------------------------------------------------------------


def test_packaged_profiles_have_a_source_for_every_figure() -> None:
    for name in packaged("json"):
        profile = load_profile(name)
        figures = {*Machine.model_fields, "workload"} - {"memory"}  # the profiles leave it out
        assert figures <= set(profile.sources), figures - set(profile.sources)


def test_decode_steps_are_interpolated() -> None:
    machine = load_profile("two-core-cpu-135m").reserved
    points = dict(machine.decode)
    assert [machine.decode_step(rows) for rows in (8, 64)] == [points[8], points[64]]
    assert machine.decode_step(20) == pytest.approx((points[8] + points[32]) / 2)
    assert machine.decode_step(96) == pytest.approx(2 * points[64] - points[32]), "prolonged"


def test_invalid_profile_is_refused_in_one_line(tmp_path: Path) -> None:
    content = load_profile("two-core-cpu-135m").model_dump(mode="json")
    content["reserved"]["rows"] = 0
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    for name, problem in ((str(path), "reserved.rows"), ("nowhere", "allowed: one of")):
        with pytest.raises(UserError, match=problem) as refused:
            load_profile(name)
        assert "\n" not in str(refused.value)


def test_texts_are_functions_of_seed_and_position() -> None:
    whole = tokens_of(7, 0, 9000, 9000, 9001)
    assert whole[:-1] == [t for at in range(0, 8999, 37) for t in tokens_of(7, at, min(at + 37, 8999), 9000, 9001)]
    assert len(logprobs_of(7, 5, 9000)) == 8995
    length = LongTailed(100, 0.8)
    lengths = sorted(length(seed * 7919, 2000) for seed in range(999))
    assert lengths[499] == pytest.approx(100, rel=0.1) and lengths[-1] > 4 * 100
    assert chat(512).decode(tokens_of(3, 0, 20, 20, 30)).isalpha(), "the stop token is no text"


# --- the engine -------------------------------------------------------------------------------------------------------

REF = protocol.AdapterRef(policy="p", version=1, hash="h1", rank=16, alpha=32.0)
NEWER = protocol.AdapterRef(policy="p", version=2, hash="h2", rank=16, alpha=32.0)


def order(number: int, *, given: int = 0, tokens: int = 20) -> protocol.Generate:
    return protocol.Generate(
        request=f"r{number}",
        adapter=REF,
        prompt=list(range(10)),
        shared_prefix=10,
        prefix_tokens=tokens_of(number, 0, given, tokens, tokens),
        max_tokens=tokens,
        temperature=1.0,
        seed=number,
        stop_tokens=[2],
        episode=f"e{number}",
    )


def small(**changes: Any) -> Machine:
    return load_profile("two-core-cpu-135m").reserved.model_copy(update={"rows": 4, "prefill_slice": 16, **changes})


def running_in(engine: FakeEngine) -> list[str]:
    """Requests that have not ended."""
    return [row.request.request for row in engine.held() if not row.finish]


@settings(max_examples=examples(60))
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_token_is_sent_once_while_workers_join_and_leave(dice: random.Random, together: bool) -> None:
    """Requests come, are aborted, change their adapter; decode steps are taken one by one or together."""
    engine = FakeEngine(small(), LongTailed(8, 0.7), 4)
    sent: defaultdict[str, list[int]] = defaultdict(list)
    versions: defaultdict[str, list[int]] = defaultdict(list)
    given_, finished, aborted, number = {}, {}, set(), 0
    for _ in range(400):
        chance = dice.random()
        if chance < 0.2 and number < 12:
            given_[f"r{number}"] = dice.choice((0, 0, 3))
            engine.submit(order(number, given=given_[f"r{number}"]))
            number += 1
        elif chance < 0.25 and (running := running_in(engine)):
            name = dice.choice(running)
            engine.abort(protocol.Abort(request=name))
            aborted.add(name)
        elif chance < 0.35 and (running := running_in(engine)):
            name, recompute = dice.choice(running), dice.random() < 0.5
            engine.switch(protocol.SwitchAdapter(request=name, adapter=NEWER, recompute=recompute))
        if engine.busy:
            _, slices = engine.begin()
            assert slices >= 1
            engine.end(slices if together else 1)
        for chunk in engine.drain() if dice.random() < 0.5 else []:
            assert chunk.offset == given_[chunk.request] + len(sent[chunk.request])
            sent[chunk.request] += chunk.tokens
            versions[chunk.request] += [chunk.version] * len(chunk.tokens)
            if chunk.finish:
                assert chunk.request not in finished, "it ends once"
                finished[chunk.request] = chunk.finish
        if number == 12 and not engine.busy:
            break
    for chunk in engine.drain():
        sent[chunk.request] += chunk.tokens
        finished[chunk.request] = chunk.finish
    assert set(finished) | aborted == set(given_)
    for name in finished:
        seed = int(name[1:])
        length = LongTailed(8, 0.7)(seed, 20)
        assert sent[name] == tokens_of(seed, given_[name], length, length, 20)
        assert versions[name] == sorted(versions[name]), "a newer version never goes back"


def test_shared_prompt_is_prefilled_once_and_so_is_a_prefix() -> None:
    engine = FakeEngine(small(), LongTailed(8, 0.7), 4)
    for number in range(3):
        engine.submit(order(number))
    engine.submit(order(3, given=3))
    seconds = 0.0
    while engine.waiting or engine.prefilled < 13:
        took, _ = engine.begin()
        seconds += took
        engine.end()
    assert engine.prefilled == 10 + 3


def test_idle_engine_replies_to_the_claim_of_a_finished_request() -> None:
    async def play() -> list[tuple[list[int], str]]:
        chunks: list[protocol.TokenChunk] = []
        replies = []

        async def flush() -> None:
            chunks.extend(compute.engine.drain())

        compute = FakeCompute(small(), LongTailed(8, 0.7), FakeTrainer(), flush=flush, answer=lambda result: None)
        running = asyncio.create_task(compute.run())
        for _ in range(2):
            compute.engine.submit(order(1))
            compute.wake()
            await asyncio.sleep(60)
            replies.append(([token for chunk in chunks for token in chunk.tokens], "".join(c.finish for c in chunks)))
            chunks.clear()
            compute.engine.suspend(60.0)
        running.cancel()
        return replies

    first, again = run(play())
    assert first == again and first[1]


# --- the whole --------------------------------------------------------------------------------------------------------


def quick(**changes: Any) -> Profile:
    """Steps of seconds instead of minutes, so that a test sees many; generating takes longer than training."""
    profile = load_profile("two-core-cpu-135m")
    load = profile.workload.model_copy(
        update={"group_size": 4, "groups_per_step": 4, "median_tokens": 60.0, "max_tokens": 160}
    )
    spot = profile.reserved.model_copy(update={"rows": 8, "load": 5.0, **changes})
    reserved = profile.reserved.model_copy(update={"rows": 8, "train_token": 0.0005})
    return profile.model_copy(update={"workload": load, "preemptible": spot, "reserved": reserved})


COMING_AND_GOING = Trace("mine", ((0.0, 2), (45.0, 0), (70.0, 3), (95.0, 1), (110.0, 3)), 140.0)
SCENARIO = Scenario(quick(), COMING_AND_GOING, seed=3, micro_batch=4)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, ReplayResult]:
    names = ("co-located", "disaggregated", "rookery", "no-migration")
    return {name: replay(SCENARIO, MODES[name]) for name in names}


def test_preemption_discards_no_token(outcomes: dict[str, ReplayResult]) -> None:
    rookery = outcomes["rookery"]
    assert rookery.preemptions >= 3 and rookery.requeued["lost"] > 0
    assert rookery.discarded_tokens == 0, "what was received is never sampled again"
    over = outcomes["no-migration"]
    assert over.discarded_tokens > 0, "which only the mode without migration does"


OFF = {"merge_tails": False, "rollout_chunk_tokens": 0, "context_order": False}
"""The rules that turn the schedulers of rollouts off."""


def test_no_scheduler_changes_a_trajectory() -> None:
    """Synchronous jobs with long tails on two machines, with all schedulers, without each of them and without any. The
    engines' tests show the same of drafts and of the gate."""
    profile = load_profile("two-core-cpu-135m")
    tails = {"group_size": 4, "groups_per_step": 4, "median_tokens": 120.0, "sigma": 0.8, "max_tokens": 500}
    profile = profile.model_copy(update={"workload": profile.workload.model_copy(update=tails)})
    scenario = Scenario(profile, Trace("none", ((0.0, 0),), 3000.0), seed=3, jobs=2, steps=4, reserved=2)
    arms = [{}, *({name: off} for name, off in OFF.items()), OFF]
    changed = [split(arm) for arm in arms]
    outcomes = [
        replay(replace(scenario, settings=settings, rules=rules.rollouts), MODES["co-located"])
        for settings, rules in changed
    ]
    assert len({outcome.trajectories for outcome in outcomes}) == 1
    whole = outcomes[0]
    assert len(whole.steps) == 8 and whole.requeued["merged"] and whole.requeued["divided"]
    for name, reason in (("merge_tails", "merged"), ("rollout_chunk_tokens", "divided")):
        [without] = (o for o, settings in zip(outcomes, arms, strict=True) if settings == {name: OFF[name]})
        assert without.requeued[reason] == 0
    assert whole.digest != outcomes[-1].digest


@pytest.mark.parametrize(("name", "goes_on"), [("rookery", True), ("no-migration", False)])
def test_requests_of_a_lost_instance_resume_or_restart_by_mode(
    name: str, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one instance at a time nothing but its loss moves a request."""
    given_: list[int] = []
    submit = FakeEngine.submit

    def spy(engine: FakeEngine, request: protocol.Generate) -> Row:
        given_.append(len(request.prefix_tokens))
        return submit(engine, request)

    monkeypatch.setattr(FakeEngine, "submit", spy)
    mode = replace(MODES["disaggregated"], scheduler=MODES[name].scheduler, seeding=MODES[name].seeding)
    trace = Trace("mine", ((0.0, 1), (15.0, 0), (20.0, 1)), 40.0)
    outcome = replay(replace(SCENARIO, trace=trace), mode)
    assert outcome.requeued["lost"] > 0
    assert any(given_) is goes_on
    assert (outcome.discarded_tokens == 0) is goes_on


def test_preemptible_machines_help_and_reserved_ones_suffice(outcomes: dict[str, ReplayResult]) -> None:
    alone, rookery = outcomes["co-located"], outcomes["rookery"]
    assert alone.preemptible_hours == 0 and alone.preemptions == 0
    assert rookery.tokens > 1.1 * alone.tokens
    stall = [step for step in outcomes["disaggregated"].steps if 57 < step.time <= 72]
    assert not stall, "nobody generates there while there are no instances"
    assert [step for step in rookery.steps if 57 < step.time <= 75], "here the reserved one does"


def test_costs_and_the_break_even_discount_add_up(outcomes: dict[str, ReplayResult]) -> None:
    alone = outcomes["co-located"]
    assert alone.cost == pytest.approx(COMING_AND_GOING.seconds / HOUR)
    assert alone.break_even(alone) is None
    for outcome in outcomes.values():
        rented = sum(
            number * (after - time)
            for (time, _, number), (after, *_) in zip(
                outcome.instances, [*outcome.instances[1:], (outcome.seconds, 0, 0)], strict=True
            )
        )
        assert outcome.preemptible_hours * HOUR == pytest.approx(rented, abs=1.0), "it is paid while it is rented"
        assert all(rented <= available for _, available, rented in outcome.instances)
        if (even := outcome.break_even(alone)) is not None:
            assert outcome.tokens / outcome.cost_at(even) == pytest.approx(alone.tokens / alone.cost)


@pytest.mark.parametrize(("name", "seconds", "remembers"), [("no-seeding", 0.0, True), ("no-memory", None, False)])
def test_ablation_removes_one_part(name: str, seconds: float | None, remembers: bool) -> None:
    part = MODES[name].seeding
    assert isinstance(part, type) and issubclass(part, Seeding)
    learner = part.planner(initial=10.0, eta=3.0, reserved=1)
    cycle = Cycle(seeded=10.0, trainer_wait=9.0, remote_wait=3.0, train=20.0, remote=10.0, instances=2.0)
    for _ in range(3):
        learner.learn(replace(cycle, seeded=learner.seconds), available=2, reserved=1)
    assert learner.seconds == seconds if seconds is not None else learner.seconds > 10.0
    before = learner.seconds
    learner.learn(replace(cycle, seeded=before, instances=1.0), available=1, reserved=1)
    learner.begin(2)
    assert (learner.seconds == before) is remembers
    assert replay(replace(SCENARIO, trace=COMING_AND_GOING.cut(30)), MODES[name]).steps


def test_balanced_instances_generate_as_fast_as_training() -> None:
    profile = load_profile("two-core-cpu-135m")
    trains, generates = 1 / profile.reserved.train_token, 64 / profile.spot.decode_step(64)
    assert generates > trains and balanced(profile, 128, 1) == 1
    assert balanced(profile, 128, 3) == 3
    assert balanced(quick(), 16, 1) == pytest.approx(2000 / (8 / profile.spot.decode_step(8)), abs=1)


def test_preemption_notice_leaves_no_token_unsent() -> None:
    outcome = replay(replace(SCENARIO, trace=COMING_AND_GOING.cut(100), notice=30.0), MODES["rookery"])
    assert outcome.preemptions >= 3
    assert outcome.unsent_tokens == 0, "a draining worker sends what it has"


def test_jobs_end_after_their_steps_and_share_the_machines() -> None:
    outcome = replay(Scenario(quick(), COMING_AND_GOING, jobs=2, steps=3, micro_batch=4), MODES["rookery"])
    assert outcome.seconds < COMING_AND_GOING.seconds
    assert len({step.job for step in outcome.steps}) == 2 and len(outcome.steps) == 6


def test_each_policy_of_a_job_steps_on_the_tokens_of_its_replies() -> None:
    scenario = Scenario(quick(), Trace("none", ((0.0, 0),), 6000.0), jobs=1, policies=2, steps=2, reserved=2)
    outcome = replay(scenario, MODES["co-located"])
    alone = replay(replace(scenario, policies=1), MODES["co-located"])
    assert (len(outcome.steps), len(alone.steps)) == (4, 2)
    assert outcome.tokens == pytest.approx(2 * alone.tokens, rel=0.3)
    assert outcome.seconds > alone.seconds


def test_modes_are_parsed_and_unknown_ones_refused() -> None:
    assert parse_modes("all") == list(MODES.values())
    assert parse_modes("rookery, co-located,rookery") == [MODES["rookery"], MODES["co-located"]]
    with pytest.raises(UserError, match="allowed: all, or some of co-located"):
        parse_modes("rookery,fast")


# --- replayable -------------------------------------------------------------------------------------------------------


def interrupted() -> str:
    """The event log of jobs that are paused, resumed and cancelled while their episodes run, and lose a worker."""

    async def play(folder: str) -> str:
        profile = quick()
        site = SimulatedService(Path(folder), LongTailed(60, 0.6), context=2048, seed=1, tenants=["a", "b"])
        controller = site.controller
        await controller.start()
        host = site.host({"builtin:e": 0.3}, prompt_tokens=8, turns=2)
        await host.join()
        workers = [site.worker("w0", profile.reserved)]
        workers += [site.worker(f"w{n}", profile.spot, roles=("rollout",), kind="preemptible") for n in (1, 2)]
        for worker in workers:
            worker.start()
        algorithm = {"group_size": 4, "groups_per_step": 3, "max_staleness": 1, "in_flight": "switch"}
        job = {"name": "j", "base_model": MODEL, "environment": {"id": "e"}, "stop": {"wall_time": 1000},
               "algorithm": algorithm, "sampling": {"max_tokens": 160}}  # fmt: skip
        jobs = [(tenant, (await controller.submit(tenant, job))[0].id) for tenant in ("a", "b")]
        changes: list[tuple[float, Callable[[], Awaitable[object]]]] = [
            (31.0, lambda: asyncio.gather(*(controller.pause(*one) for one in jobs))),
            (3.0, lambda: asyncio.gather(*(controller.resume(*one) for one in jobs))),
            (11.0, workers[1].kill),
            (9.0, lambda: controller.cancel(*jobs[0])),
            (5.0, lambda: asyncio.sleep(0)),
        ]
        for seconds, change in changes:
            await asyncio.sleep(seconds)
            await change()
        digest = f"{site.log.digest()} {site.log.frames}"
        for worker in (workers[0], workers[2]):
            await worker.kill()
        await host.leave()
        await site.close()
        return digest

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(play(folder))


def played(seed: int) -> str:
    outcome = replay(replace(SCENARIO, trace=COMING_AND_GOING.cut(60), seed=seed, jobs=2), MODES["rookery"])
    return f"{outcome.digest} {outcome.events} {outcome.tokens}"


ELSEWHERE = """
import logging, sys
sys.path.insert(0, {tests!r})
logging.disable(logging.WARNING)
from tests.simulation.test_simulation import interrupted, played
junk = [object() for _ in range(1000)]  # other addresses: nothing may depend on them
print(played(3))
print(interrupted())
"""


def test_same_seed_gives_the_same_frames_in_any_process() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", ELSEWHERE.format(tests=str(Path(__file__).parents[2]))],
        env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True, text=True, check=True, timeout=120,
    ).stdout.splitlines()  # fmt: skip
    assert shown == [played(3), interrupted()]
    assert shown[0] != played(4)


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_tables_and_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "quick.json"
    machine.write_text(quick().model_dump_json())
    trace = tmp_path / "mine.csv"
    changes = "".join(f"{time},{count}\n" for time, count in COMING_AND_GOING.changes)
    trace.write_text(f"time,instances\n{changes}{COMING_AND_GOING.seconds},0\n")
    out = tmp_path / "out"
    main_ = ["simulate", "--trace", str(trace), "--profile", str(machine), "--modes", "co-located,rookery"]
    with pytest.raises(SystemExit) as ended:
        main([*main_, "--hours", "0.01", "--out", str(out)])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "SIMULATED" in shown and "event log" in shown and "co-located" in shown
    found = json.loads((out / "results.json").read_text())
    assert found["simulated"] is True and found["event_log"] in shown
    assert [mode["mode"] for mode in found["modes"]] == ["co-located", "rookery"]


def test_results_are_json(outcomes: dict[str, ReplayResult]) -> None:
    found = as_json(list(outcomes.values()))
    assert json.loads(json.dumps(found))["modes"][2]["break_even_discount"] < 1


@pytest.mark.parametrize("wrong", [["--trace", "nowhere.csv"], ["--modes", "fast"], ["--profile", "quick"]])
def test_invalid_options_are_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *wrong])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
