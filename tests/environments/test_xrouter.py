"""The built-in xrouter: its reward, its protocol, and the optimum that its table gives."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.base import Reply
from rookery.environments.builtins import find
from rookery.environments.xrouter import (
    DIFFICULTIES,
    XRouter,
    XRouterOptions,
    best_route,
    best_threshold,
    constant_routes,
    optimum,
    route_reward,
)
from rookery.errors import UserError

MODELS = {
    "sure": {"price": 0.1, "accuracy": [1, 1, 1]},
    "never": {"price": 0.1, "accuracy": [0, 0, 0]},
    "dear": {"price": 5.0, "accuracy": [1, 1, 1]},
    "free": {"price": 0, "accuracy": [1, 1, 1]},
}


def played(replies: list[str], seed: int = 0, prompt: int = 0, **options: Any) -> tuple[float, dict[str, float], int]:
    """The reward, the metrics, and the number of replies that the environment took."""
    environment: Any = find("xrouter")({"models": MODELS, "prompts": 3, "eval_prompts": 0, **options}).for_episode()
    environment.prompt, environment.seed = [*environment.prompts("train")][prompt], seed
    environment.reset(environment.prompt, seed)
    for turn, text in enumerate(replies):
        step = environment.step(Reply(text.replace("ANSWER", environment.prompt["answer"]), [], [], turn))
        if step.done:
            return step.reward, step.metrics, turn + 1
    raise AssertionError("the episode has not ended")


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        (["ANSWER"], 1.0),  # right and free
        (["0"], 0.0),  # wrong and free
        (["call_free()", "select_response(call_1)"], 1.0),
        (["call_sure()", "select_response(call_1)"], 0.8),
        (["call_dear()", "select_response(call_1)"], 0.2),  # right and dear: success - cost_cap
        (["call_never()", "select_response(call_1)"], 0.0),
        (["call_sure(a prompt, 0.5) call_never()", "select_response(call_1)"], 0.6),  # both cost
        (["call_sure() call_never()", "select_response(call_2)"], 0.0),
        (["call_never()", "call_sure()", "select_response( call_2 )"], 0.6),
        (["call_sure()", "ANSWER"], 0.8),  # its own answer after a call
        (["<think>call_dear() costs much</think>ANSWER"], 1.0),
        (["4</think>call_free()", "<think>call_1?</think>select_response(call_1)"], 1.0),
        # endings that are no answer
        (["call_sure()", "call_sure()", "call_sure()"], 0.0),
        (["call_sure()", "select_response(call_1) select_response(call_1)"], 0.0),
        (["call_sure()", "select_response(call_2)"], 0.0),
        (["select_response(call_0)"], 0.0),
        (["call_sure() select_response(call_1)"], 0.0),
        (["call_unknown()"], 0.0),
        (["recall_free()"], 0.0),
        (["unselect_response(call_1)"], 0.0),
        (["call_sure("], 0.0),
        (["call_sure(" + "x" * 5000 + ")"], 0.0),
        (["call_free() " * 9], 0.0),
        (["select_response(1)"], 0.0),
        ([""], 0.0),
        (["<think>ANSWER"], 0.0),
        (["the answer is ANSWER or 1"], 0.0),
    ],
)
def test_a_right_answer_earns_the_reward_that_its_calls_leave(replies: list[str], reward: float) -> None:
    earned, metrics, turns = played(replies)
    assert (earned, turns) == (pytest.approx(reward), len(replies))
    assert metrics["right"] == float(reward > 0)


@given(st.floats(0, 10), st.floats(0, 2), st.floats(0, 1), st.floats(0, 2), st.booleans())
def test_reward_falls_with_cost_and_a_wrong_answer_earns_nothing(
    weight: float, one: float, cap: float, other: float, right: bool
) -> None:
    options = XRouterOptions(cost_weight=weight, cost_cap=cap)
    low, high = sorted((one, other))
    cheap, dear = options.reward(float(right), low), options.reward(float(right), high)
    assert cheap >= dear >= 0 and (right or cheap == 0) and (not right or 1 >= dear >= 1 - cap - 1e-12)
    if right and weight * high < cap:
        assert cheap - dear == pytest.approx(weight * (high - low))


def test_a_longer_word_is_no_call() -> None:
    assert [played([text])[1]["calls"] for text in ("recall_sure()", "xcall_sure() ANSWER", "x_call_sure()")] == [
        0.0
    ] * 3
    assert played(["**call_sure()**", "select_response(call_1)"])[1]["calls"] == 1.0


def test_without_the_gate_a_wrong_answer_pays_for_its_calls() -> None:
    assert played(["call_never()", "select_response(call_1)"], gate=False)[0] == pytest.approx(-0.2)
    assert played(["0"], gate=False)[0] == 0.0, "the cheapest way to be wrong"


def test_with_answer_last_the_response_to_the_last_call_is_the_answer() -> None:
    assert played(["call_never() call_sure()"], answer="last")[0] == pytest.approx(0.6)
    assert played(["call_sure() call_never()"], answer="last")[0] == 0.0
    _, metrics, _ = played(["call_sure()"], answer="last")
    assert metrics == {"right": 1, "cost": pytest.approx(0.1), "calls": 1, "valid": 1, "expected": pytest.approx(0.8)}


def test_responses_are_drawn_from_the_seed_with_the_accuracy_of_the_table() -> None:
    options = {"answer": "last", "models": {"half": {"price": 0, "accuracy": [0.9, 0.5, 0.1]}}}
    for number, accuracy in enumerate((0.9, 0.5, 0.1)):
        results = [played(["call_half()"], seed=seed, prompt=number, **options)[0] for seed in range(200)]
        assert statistics.fmean(results) == pytest.approx(accuracy, abs=0.12)
        assert results == [played(["call_half()"], seed=seed, prompt=number, **options)[0] for seed in range(200)]


def test_yardsticks_equal_the_rewards_of_scripted_routers() -> None:
    """Over the seeds, the mean reward of a scripted router is its expected one."""
    environment: Any = find("xrouter")({"answer": "last", "prompts": 60})
    options, prompts = XRouterOptions(answer="last", prompts=60), list(environment.prompts("train"))
    assert [prompt["difficulty"] for prompt in prompts[:3]] == [*DIFFICULTIES]

    def earned(route: Any) -> float:
        rewards = []
        for seed in range(50):
            for prompt in prompts:
                episode = environment.for_episode()
                episode.prompt, episode.seed = prompt, seed
                episode.reset(prompt, seed)
                rewards.append(episode.step(Reply(f"call_{route(prompt)}()", [], [], 0)).reward)
        return statistics.fmean(rewards)

    constants = constant_routes(options, prompts)
    best = optimum(options, prompts)
    assert earned(lambda prompt: best_route(options, prompt)) == pytest.approx(best, abs=0.03)
    assert earned(lambda prompt: "mid") == pytest.approx(constants["mid"], abs=0.03)
    assert best > best_threshold(options, prompts) > max(constants.values())
    constant = environment.best_constant(prompts)
    assert (constant.reply, constant.reward) == ("call_mid()", constants["mid"])


@pytest.mark.parametrize(
    "options",
    [
        {"models": {"only": {"price": 0.1, "accuracy": [0.9, 0.5, 0.1]}}},
        {"models": {"a": {"price": 0.1, "accuracy": [0.9] * 3}, "b": {"price": 0.1, "accuracy": [0.9] * 3}}},
        {"cost_weight": 0},
    ],
)
def test_a_constant_is_the_optimum_where_there_is_nothing_to_route(options: dict[str, Any]) -> None:
    """One model, equal models, or a cost without weight: no gain is left over the best constant."""
    chosen = XRouterOptions.model_validate({"answer": "last", **options})
    prompts = list(XRouter(chosen).prompts("eval"))
    assert optimum(chosen, prompts) == pytest.approx(max(constant_routes(chosen, prompts).values()))


@pytest.mark.parametrize("weight", [0.5, 2.0, 5.0, 40.0])
@pytest.mark.parametrize("gate", [True, False])
def test_no_reply_to_a_table_without_chance_earns_more_than_the_optimum(gate: bool, weight: float) -> None:
    """Every model is right or wrong for sure, so that what each reply earns is exact: of all replies with up to two
    calls, and a wrong number, the best for each question makes the optimum, the best for all the best constant."""
    models = {"low": {"price": 0.05, "accuracy": [1, 0, 0]}, "top": {"price": 0.3, "accuracy": [1, 1, 0]}}
    given = {"models": models, "answer": "last", "gate": gate, "cost_weight": weight, "prompts": 6, "eval_prompts": 0}
    environment: Any = find("xrouter")(given)
    prompts = [*environment.prompts("train")]
    calls = [f"call_{name}()" for name in models]
    replies = [*calls, *(f"{one} {other}" for one in calls for other in calls), "0"]
    earned = {reply: [played([reply], prompt=n, **given)[0] for n in range(len(prompts))] for reply in replies}
    best = [max(rewards) for rewards in zip(*earned.values(), strict=True)]
    assert optimum(XRouterOptions.model_validate(given), prompts) == pytest.approx(statistics.fmean(best))
    constant = environment.best_constant(prompts)
    means = {reply: statistics.fmean(rewards) for reply, rewards in earned.items()}
    assert constant.reward == pytest.approx(max(means.values())) and means[constant.reply] == max(means.values())


def test_cost_of_the_optimum_falls_with_its_weight() -> None:
    def cost(weight: float) -> float:
        options = XRouterOptions(cost_weight=weight)
        prompts = list(XRouter(options).prompts("eval"))
        return statistics.fmean(options.models[best_route(options, prompt)].price for prompt in prompts)

    costs = [cost(weight) for weight in (0, 0.5, 2, 5)]
    assert costs == sorted(costs, reverse=True) and len({*costs}) == 3


def test_a_pool_offers_some_of_the_models_and_no_others_can_be_called() -> None:
    options = XRouterOptions(pool=2, prompts=60)
    environment = XRouter(options)
    train, held_out = list(environment.prompts("train")), list(environment.prompts("eval"))
    assert len({prompt["question"] for prompt in [*train, *held_out]}) == len(train) + len(held_out)
    assert {len(prompt["pool"]) for prompt in train} == {2} and len({(*prompt["pool"],) for prompt in train}) == 3
    prompt = train[0]
    (missing,) = {*options.models} - {*prompt["pool"]}
    assert route_reward(options, prompt, missing) == 0
    episode: Any = environment.for_episode()
    episode.prompt, episode.seed = prompt, 0
    asked = episode.reset(prompt, 0)[-1]["content"]
    assert all(name in asked for name in prompt["pool"]) and missing not in asked
    assert episode.step(Reply(f"call_{missing}()", [], [], 0)).metrics["valid"] == 0


def test_examples_and_system_message_come_before_the_question() -> None:
    environment: Any = find("xrouter")(
        {"system": "Route", "examples": [["Prove it =", "call_top()"]], "instruction": "{names}: {question} ="}
    )
    prompt = next(iter(environment.prompts("eval")))
    assert environment.reset(prompt, 0) == [
        {"role": "system", "content": "Route"},
        {"role": "user", "content": "Prove it ="},
        {"role": "assistant", "content": "call_top()"},
        {"role": "user", "content": f"low, mid, top: {prompt['question']} ="},
    ]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"pool": 4}, "pool is at most 3"),
        ({"instruction": "Which?"}, "instruction contains {question}"),
        ({"cost_cap": 2}, "cost_cap is at most success"),
        ({"prompts": 5000}, "prompts \\+ eval_prompts is at most"),
        ({"models": {}}, "models"),
        ({"models": {"Big One": {"price": 1, "accuracy": [1, 1, 1]}}}, "models"),
        ({"models": {"m": {"price": -1, "accuracy": [1, 1, 1]}}}, "price"),
        ({"models": {"m": {"price": 1, "accuracy": [1, 1]}}}, "accuracy"),
        ({"models": {"m": {"price": 1, "accuracy": [1, 1, 1.5]}}}, "accuracy"),
        ({"cost_weight": float("nan")}, "cost_weight"),
        ({"turns": 0}, "turns"),
        ({"turns": 1}, "turns is at least 2 where answer is select"),
    ],
)
def test_wrong_options_are_refused_with_their_place(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        find("xrouter").validate_options(options)


def test_sizes_are_those_of_the_splits() -> None:
    sizes = find("xrouter").validate_options({"prompts": 100, "eval_prompts": 10})
    environment = find("xrouter")({"prompts": 100, "eval_prompts": 10})
    assert (sizes.train, sizes.held_out) == (100, 10)
    assert [len([*environment.prompts(split)]) for split in ("train", "eval")] == [100, 10]  # type: ignore[arg-type]
