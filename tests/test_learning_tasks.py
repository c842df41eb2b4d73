"""The tasks of docs/learning-tasks.md with scripted policies: optimum, best constant, oracle, and who earns what."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.jobs import learning_tasks
from benchmarks.lib.harness import ResultFolders

import rookery
from rookery.client import Record
from rookery.client.connection import record
from rookery.environments.builtins import find
from rookery.environments.xrouter import DIFFICULTIES, XRouter
from rookery.errors import RookeryError
from rookery.examples import learning, memory_controller, solver_verifier, word_game, xrouter
from rookery.examples.charts import Line, line_chart, ticks
from rookery.examples.learning import Learned, Point, play
from rookery.examples.memory_controller import DESIGNS, GROUPS, NUMBERS, WORKLOADS, MemoryController, Workload
from rookery.examples.solver_verifier import SolverVerifier
from rookery.examples.word_game import WordGame
from rookery.examples.words import KINDS
from rookery.spec.parsing import parse_job


def always(text: str) -> Callable[..., str]:
    return lambda messages, turn: text


# --- all tasks ------------------------------------------------------------------------------------------------------

TASKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "xrouter": (XRouter(xrouter.options(2.0)), xrouter.job(8)),
    "memory-controller": (MemoryController(), memory_controller.job(8)),
    "solver-verifier": (SolverVerifier(), solver_verifier.job(8)),
    "word-game": (WordGame(), word_game.job(8, 2)),
}


def test_a_version_whose_held_out_episodes_all_failed_is_no_point_of_a_curve() -> None:
    failed = {"prompt": 1, "reward": 0.0, "metrics": {}, "error": "the environment is away"}
    row = record({"policy": "main", "version": 8, "mean": None, "stderr": None, "held_out": [failed]})
    with pytest.raises(RookeryError, match="version 8 of main: every held-out episode failed"):
        learning.points([row], "main")
    assert learning.points([row], "other") == []


@pytest.mark.parametrize("name", TASKS)
def test_jobs_are_accepted_and_prompts_are_held_out(name: str) -> None:
    environment, fields = TASKS[name]
    given = xrouter.environment(2.0) if name == "xrouter" else {"hosted": name}
    job = parse_job({"name": name, "base_model": learning.MODEL, "environment": given, **fields})
    if job.environment.id is not None:
        find(job.environment.id).validate_options(job.environment.options)
    train, held_out = (list(environment.prompts(split)) for split in ("train", "eval"))
    assert len(held_out) == fields["evaluation"]["prompts"] and len(train) >= 18
    known = [json.dumps(prompt, sort_keys=True) for prompt in train]
    assert not {json.dumps(prompt, sort_keys=True) for prompt in held_out} & {*known}
    assert [json.dumps(prompt, sort_keys=True) for prompt in environment.prompts("train")] == known


def test_a_policy_of_a_scripted_episode_gets_its_reward_and_the_shared_one() -> None:
    class Two(rookery.Environment):
        def reset(self, prompt: Any, seed: int) -> rookery.Step:
            return rookery.Step(messages=[{"role": "user", "content": "a?"}], policy="a")

        def step(self, reply: rookery.Reply) -> rookery.Step:
            if reply.turn == 0:
                return rookery.Step(messages=[{"role": "user", "content": "b?"}], policy="b", rewards={"a": 0.5})
            return rookery.Step(done=True, reward=1.0, metrics={"length": float(len(reply.text))})

    game = play(Two(), None, 0, {"a": always("x"), "b": always("yy"), "c": always("never asked")})
    assert game.rewards == {"a": 1.5, "b": 1.0} and game.metrics == {"length": 2}
    assert [message["content"] for message in game.messages] == ["a?", "x", "b?", "yy"]


def made(
    policies: Sequence[str], metrics: dict[str, float], prompts: Sequence[Any], first: float, last: float
) -> Learned:
    """Results of a run that never took place."""
    results = [Record({"prompt": p, "answer": "call_mid()", "error": "", "metrics": metrics}) for p in prompts]
    return Learned(
        name="made",
        state="completed",
        reason="steps",
        curves={name: [Point(0, first, 0.02, metrics), Point(9, last, 0.02, metrics)] for name in policies},
        held_out=dict.fromkeys(policies, results),
        training={name: [first, last] for name in policies},
        training_metrics={name: [metrics, metrics] for name in policies},
        episodes=96,
        tokens=1000,
        seconds=1.0,
    )


def test_a_verdict_compares_with_the_first_version_and_with_the_best_constant() -> None:
    def words(first: float, last: float, constant: float) -> str:
        return learning.verdict(made(["p"], {}, [], first, last), "p", constant).split(": ")[-1]

    assert words(0.2, 0.8, 0.5) == "learned"
    assert words(0.2, 0.4, 0.5) == "rose, but a constant is better"
    assert words(0.5, 0.53, 0.1) == "NOT learned"


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("name", TASKS)
def test_reports_have_figures_and_charts_and_say_whether_policies_learned(
    name: str, good: bool, tmp_path: Path
) -> None:
    """The results of the examples, and the part of them that the benchmarks keep."""
    environment, _ = TASKS[name]
    prompts, first, last = list(environment.prompts("eval")), 0.1, 0.95 if good else 0.12
    if name == "xrouter":
        metrics = {"expected": last, "cost": 0.1, "right": last}
        runs = {f"xrouter-{w:g}": made(["main"], metrics, prompts, first, last) for w in (0.0, 2.0)}
        passed = xrouter.report(tmp_path, (0.0, 2.0), runs, {})
        assert (tmp_path / "pareto.svg").exists()
    elif name == "memory-controller":
        run = made([*GROUPS], {"score": last}, prompts, first, last)
        run.curves = {g: [Point(0, first, 0.02, {"score": first}), points[-1]] for g, points in run.curves.items()}
        passed = memory_controller.report(tmp_path, run, {})
    elif name == "solver-verifier":
        metrics = {"first right": 0.9, "arrived right": 0.5, "right": last, "rejected": 0.5}
        passed = solver_verifier.report(tmp_path, made(["solver", "verifier"], metrics, prompts, first, last))
    else:
        facts = {"best constant": ["2", 0.5]}
        passed = word_game.report(
            tmp_path, made(["player"], {"won": last, "good moves": last, "legal": 1.0}, prompts, first, last), facts
        )
    assert passed == good
    xml.etree.ElementTree.parse(tmp_path / "curves.svg")
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["task"] == name and found["command"].startswith("python examples/")
    assert found["commit"] and found["date"]
    for made_folder in ("kept", "plots"):
        (tmp_path / made_folder).mkdir()
    learning_tasks.keep(tmp_path, ResultFolders(tmp_path / "kept"), tmp_path / "plots")
    (kept,) = (json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "kept").iterdir())
    assert kept["commit"] == found["commit"] and kept["rows"]
    assert all(verdict["met"] for verdict in kept["verdicts"][:1]) == good
    assert [*(tmp_path / "plots").glob("*curves.svg")]


def test_charts_are_svg_that_shows_every_point_and_level() -> None:
    lines = [Line("a < b", [(0, 0.1), (5, 0.9)], [0.1, 0.1], ["start", "end"]), Line("dots", [(2, -0.3)], joined=False)]
    root = xml.etree.ElementTree.fromstring(line_chart("T & C", "x", "y", lines, {"best": 0.5}))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"T & C", "a < b", "dots", "best 0.50", "start", "end"} <= {*texts}
    assert len([*root.iter("{http://www.w3.org/2000/svg}circle")]) == 3
    bars = [element.get("d") or "" for element in root.iter("{http://www.w3.org/2000/svg}path")]
    ends = [float(end) for bar in bars for end in re.findall(r"V([0-9.]+)", bar)]
    assert len(ends) == 2 and min(ends) >= 40, "error bars stay below the title"
    with pytest.raises(ValueError, match="at least one point"):
        line_chart("nothing", "x", "y", [Line("empty", [])])


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.5, 0.93), (0, 30), (0, 0.0371), (3, 4), (0, 1e6)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7 and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9
    assert len({round(b - a, 9) for a, b in itertools.pairwise(found)}) == 1


# --- xrouter --------------------------------------------------------------------------------------------------------


def test_routes_count_the_last_call_of_each_reply() -> None:
    answers = [("easy", "call_low()"), ("easy", "call_low() call_top()"), ("hard", "42")]
    assert xrouter.routes(answers) == {"easy": {"low": 1, "top": 1}, "medium": {}, "hard": {"none": 1}}


@pytest.mark.parametrize(("warm_up", "name"), [(0, "constant"), (6, "warmup")])
def test_the_learning_rate_of_a_router_rises_where_that_is_asked_for(warm_up: int, name: str) -> None:
    job = {"name": "task", "base_model": learning.MODEL, "environment": xrouter.environment(0.5)}
    schedule = parse_job({**job, **xrouter.job(8, warm_up)}).policies["main"].optimizer.schedule
    assert (schedule.name, schedule.warmup_steps) == (name, warm_up)


def test_yardsticks_leave_room_for_a_router_where_the_cost_counts() -> None:
    prompts = list(XRouter(xrouter.options(2.0)).prompts("eval"))
    for weight in xrouter.WEIGHTS:
        known = xrouter.yardsticks(weight, prompts)
        assert known["optimum"] >= known["best threshold"] >= max(known["cheapest"], known["dearest"])
        assert known["optimum"] >= known["best constant"] >= known["random"]
    known = xrouter.yardsticks(2.0, prompts)
    assert 0.9 * known["optimum"] > max(known["best constant"], known["best threshold"])


def test_a_weight_with_which_no_call_earns_anything_is_refused() -> None:
    prompts = list(XRouter(xrouter.options(2.0)).prompts("eval"))
    for text in ("-1", "nan", "inf", f"{xrouter.USELESS:g}"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"given {text}, allowed: at least 0 and less than 50"):
            xrouter.weight_of(text)
    assert xrouter.yardsticks(xrouter.USELESS, prompts)["optimum"] == 0
    assert xrouter.yardsticks(xrouter.weight_of(f"{0.99 * xrouter.USELESS}"), prompts)["optimum"] > 0


def test_the_form_of_a_call_is_taught_with_every_model_alike() -> None:
    environment, fields = xrouter.form()
    job = parse_job({"name": xrouter.FORM, "base_model": learning.MODEL, "environment": environment, **fields})
    size = job.algorithm.batch_size
    assert size is not None and job.stop.steps is not None and len(environment["rows"]) == size * job.stop.steps
    router = XRouter(xrouter.options(2.0))
    asked = {prompt["question"]: prompt for prompt in router.prompts("train")}
    taught = Counter[tuple[int, str, str]]()
    for number, row in enumerate(environment["rows"]):
        *opened, reply = row["messages"]
        prompt = asked.pop(opened[-1]["content"].removesuffix(" ="))  # a training question, once
        assert opened == router.for_episode().reset(prompt, 0), "the router reads the same"
        taught[number // size, prompt["difficulty"], reply["content"]] += 1
    assert len(taught) == job.stop.steps * len(DIFFICULTIES) * len(xrouter.MODELS) and {*taught.values()} == {2}


# --- memory controller ----------------------------------------------------------------------------------------------


def test_the_designs_are_the_product_of_the_groups_and_each_workload_has_one_best() -> None:
    assert len({*DESIGNS}) == math.prod(map(len, GROUPS.values())) == 256
    for workload in WORKLOADS:
        scores = [memory_controller.score(workload, design) for design in DESIGNS]
        assert (min(scores), max(scores)) == (0.0, 1.0)
        for design in DESIGNS[::17]:
            assert all(
                math.isfinite(value) and value > 0 for value in memory_controller.latency_and_power(workload, design)
            )
    best = {max(DESIGNS, key=lambda design: memory_controller.score(workload, design)) for workload in WORKLOADS}
    assert len(best) >= 8, "workloads want different designs"


def test_controllers_behave_as_memory_does() -> None:
    """More load takes longer; open rows pay where requests hit them, closed ones where they do not."""
    design = ("open", "rows", "eight", "normal")
    closed = ("closed", *design[1:])
    for hits in memory_controller.LEVELS:
        waits = [
            memory_controller.latency_and_power(Workload(hits, load, "both"), design)[0]
            for load in ("low", "medium", "high")
        ]
        assert waits == sorted(waits)
    high, low = Workload("high", "medium", "latency"), Workload("low", "medium", "latency")
    assert memory_controller.objective(high, design) < memory_controller.objective(high, closed)
    assert memory_controller.objective(low, design) > memory_controller.objective(low, closed)


def number(group: str, choice: str) -> str:
    return NUMBERS[GROUPS[group].index(choice)]


def test_policies_that_choose_the_best_design_earn_the_optimum() -> None:
    environment = MemoryController()
    for prompt in environment.prompts("eval"):
        workload = Workload(**prompt)
        best = max(DESIGNS, key=lambda design: memory_controller.score(workload, design))
        policies = {group: always(number(group, choice)) for group, choice in zip(GROUPS, best, strict=True)}
        game = play(environment, prompt, 0, policies)
        assert game.rewards == dict.fromkeys(GROUPS, pytest.approx(1.0)) and game.metrics["optimal"] == 1


def test_only_the_policy_with_a_reply_that_is_no_choice_is_punished() -> None:
    prompt = next(iter(MemoryController().prompts("train")))
    policies = {"page": always("2"), "scheduler": always("scheduler"), "queue": always("3"), "refresh": always("4")}
    game = play(MemoryController(), prompt, 0, policies)
    earned = memory_controller.score(Workload(**prompt), ("closed", "order", "twenty", "bank"))
    assert game.rewards == {g: pytest.approx(earned - 0.5 * (g == "scheduler")) for g in GROUPS}
    assert game.metrics["valid"] == 0


def test_the_best_constant_design_is_below_the_optimum_and_above_any_other() -> None:
    held_out = [workload for workload in WORKLOADS if memory_controller.is_held_out(workload)]
    design, score = memory_controller.best_constant(held_out)
    means = [statistics.fmean(memory_controller.score(w, d) for w in held_out) for d in DESIGNS]
    assert score == max(means) == means[DESIGNS.index(design)] and statistics.fmean(means) < score < 0.9


def test_the_best_constant_of_each_policy_earns_its_stated_reward() -> None:
    environment = MemoryController()
    prompts = list(environment.prompts("eval"))
    constants = environment.best_constant(prompts)
    policies = {group: always(constant.reply) for group, constant in constants.items()}
    games = [play(environment, prompt, 0, policies) for prompt in prompts]
    assert list(constants) == list(GROUPS)
    for group, constant in constants.items():
        assert constant.prompts == len(prompts)
        assert constant.reward == pytest.approx(statistics.fmean(game.rewards[group] for game in games))


@pytest.mark.parametrize("search", [memory_controller.random_search, memory_controller.hill_climbing])
def test_searches_call_the_simulator_as_often_as_allowed_and_find_more_with_more(
    search: Callable[..., float],
) -> None:
    calls = 0

    def counted(workload: Workload, design: Any) -> float:
        nonlocal calls
        calls += 1
        return memory_controller.score(workload, design)

    few = [search(workload, 4, random.Random(1), counted) for workload in WORKLOADS]
    assert calls == 4 * len(WORKLOADS)
    many = [search(workload, 60, random.Random(1), counted) for workload in WORKLOADS]
    assert calls == 64 * len(WORKLOADS) and statistics.fmean(many) > statistics.fmean(few)
    if search is memory_controller.random_search:
        assert search(WORKLOADS[0], 256, random.Random(2)) == 1.0


# --- solver and verifier --------------------------------------------------------------------------------------------


def test_kinds_share_no_word() -> None:
    words = [word for kind in KINDS.values() for word in kind]
    assert len(words) == len({*words}) and {len(kind) >= 20 for kind in KINDS.values()} == {True}


def kind_of(word: str) -> str:
    return next((kind for kind, words in KINDS.items() if word in words), "")


NUMBERS_ALONE = {*KINDS[solver_verifier.KIND]}


def oracle(messages: Sequence[dict[str, str]], turn: int) -> str:
    return next(word for word in messages[9]["content"].split(", ") if word in NUMBERS_ALONE)


def wrong(messages: Sequence[dict[str, str]], turn: int) -> str:
    return next(word for word in messages[9]["content"].split(", ") if word not in NUMBERS_ALONE)


def judge(messages: Sequence[dict[str, str]], turn: int) -> str:
    return "number" if messages[-1]["content"].removesuffix(" is a") in NUMBERS_ALONE else "thing"


@pytest.mark.parametrize(
    ("solver", "verifier", "noisy", "rewards", "replies"),
    [
        (oracle, judge, False, {"solver": 1, "verifier": 1}, 2),
        (oracle, judge, True, {"solver": 1, "verifier": 1}, 3),  # the wrong word arrives, and is picked again
        (oracle, always("thing"), False, {"solver": 1, "verifier": 0}, 3),  # a retry that is right again
        (oracle, always("number"), True, {"solver": 0.5, "verifier": 0}, 2),  # what arrived stays
        (oracle, always("perhaps"), True, {"solver": 1, "verifier": 1}, 3),  # another reply rejects, too
        (wrong, always("number"), False, {"solver": 0, "verifier": 0}, 2),
        (wrong, judge, False, {"solver": 0, "verifier": 1}, 3),  # one retry, not two
        (wrong, judge, True, {"solver": 0.5, "verifier": 1}, 2),  # the channel replaced a wrong pick
        (lambda m, t: (wrong if t == 0 else oracle)(m, t), judge, False, {"solver": 0.5, "verifier": 1}, 3),
        (lambda m, t: (oracle if t == 0 else wrong)(m, t), judge, True, {"solver": 0.5, "verifier": 1}, 3),
    ],
)
def test_the_verifier_approves_or_rejects_and_the_solver_has_one_retry(
    solver: Any, verifier: Any, noisy: bool, rewards: dict[str, float], replies: int
) -> None:
    for prompt in [one for one in solver_verifier.questions("eval") if one["noisy"] == noisy][:12]:
        game = play(SolverVerifier(), prompt, 0, {"solver": solver, "verifier": verifier})
        assert game.rewards == rewards
        assert sum(message["role"] == "assistant" for message in game.messages) == 4 + replies  # four are examples


@pytest.mark.parametrize("reply", ["", "perhaps", "numbers"])
def test_a_reply_that_is_neither_word_counts_as_the_first_and_costs(reply: str) -> None:
    prompt = {"words": ["nine", "oak"], "answer": "nine", "noisy": False}
    game = play(SolverVerifier(), prompt, 0, {"solver": always(reply), "verifier": judge})
    assert game.rewards == {"solver": 1 - solver_verifier.WRONG, "verifier": 1}


def test_a_step_of_questions_has_as_many_noisy_ones_as_others() -> None:
    found = solver_verifier.questions("train")
    assert all(sum(one["noisy"] for one in found[at : at + 8]) == 4 for at in range(0, len(found), 8))
    assert not solver_verifier.job(1)["shuffle"]


def test_held_out_questions_use_other_words() -> None:
    words = {split: {w for q in solver_verifier.questions(split) for w in q["words"]} for split in ("train", "eval")}
    assert not words["train"] & words["eval"]
    for question in solver_verifier.questions("train"):
        assert [kind_of(word) == solver_verifier.KIND for word in question["words"]].count(True) == 1
        assert kind_of(question["answer"]) == solver_verifier.KIND


# --- word game ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rival", [word_game.perfect, *map(word_game.constant, word_game.MOVES), always("no")])
def test_a_perfect_player_wins_every_game(rival: Any) -> None:
    for split in ("train", "eval"):
        for prompt in WordGame().prompts(split):
            game = play(WordGame(), prompt, 0, {"player": word_game.perfect, "rival": rival})
            assert game.metrics == {"won": 1, "good moves": 1, "legal": 1}
            assert game.rewards["player"] == 1 and game.rewards.get("rival", 0.0) == 0


@pytest.mark.parametrize("reply", ["0", "4", "-1", "one", "", "1 2", "1.", "²"])
def test_a_reply_that_is_no_move_takes_one_letter_and_costs(reply: str) -> None:
    game = play(WordGame(), {"word": "peach"}, 0, {"player": always(reply), "rival": always("3")})
    assert game.metrics["legal"] == 0 and game.metrics["won"] == 1, "one letter of five is a good move; so is the last"
    assert game.rewards["player"] == pytest.approx(1 - 0.2 * 2)


def test_no_more_letters_can_be_taken_than_there_are() -> None:
    game = play(WordGame(), {"word": "peach"}, 0, {"player": always("3"), "rival": always("1")})
    assert (game.metrics["won"], game.metrics["legal"]) == (1, 0.5)


def test_no_constant_wins_every_game_against_a_perfect_rival() -> None:
    for move in word_game.MOVES:
        policies = {"player": word_game.constant(move), "rival": word_game.perfect}
        won = [play(WordGame(), prompt, 0, policies).metrics["won"] for prompt in WordGame().prompts("eval")]
        assert statistics.fmean(won) < 0.75


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["solver_verifier", "word_game", "xrouter", "memory_controller"])
def test_a_policy_of_each_task_gains_on_the_real_model(name: str, tmp_path: Path) -> None:
    """The run ends with figures and charts, and some policy gains more than two standard errors on held-out prompts.
    docs/learning-tasks.md has what each policy reached, and where a constant reply or a search wins."""
    script = Path(__file__).parents[1] / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script), "--folder", str(tmp_path)], capture_output=True, text=True)
    print(done.stdout[-4000:])
    assert done.returncode in (0, 1), done.stderr[-2000:]
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    curves = [curve for run in found["runs"].values() for curve in run["curves"].values()]
    errors = [math.hypot(curve[0]["stderr"], curve[-1]["stderr"]) for curve in curves]
    gains = [curve[-1]["mean"] - curve[0]["mean"] for curve in curves]
    assert any(gain > 2 * error for gain, error in zip(gains, errors, strict=True)), (gains, errors)
    xml.etree.ElementTree.parse(tmp_path / "curves.svg")


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_has_one_command_for_each_task() -> None:
    page = (Path(__file__).parents[1] / "docs" / "learning-tasks.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\.venv/bin/python (examples/\w+\.py)$", page, re.MULTILINE)
    expected = ["xrouter", "memory_controller", "solver_verifier", "word_game"]
    assert commands == [f"examples/{name}.py" for name in expected]


def test_the_page_shows_the_rows_of_the_feature_table() -> None:
    page = (Path(__file__).parents[1] / "docs" / "learning-tasks.md").read_text(encoding="utf-8")
    for system, anchor in (("xRouter", "routing"), ("AstraFlow", "solver-and-verifier"), ("AstraFlow", "word-game")):
        assert re.search(rf"^\| {system} \| \[[\w ]+\]\(#{anchor}\)", page, re.MULTILINE)
