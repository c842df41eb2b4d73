"""The page after a person has done something: its rules and looks in each state, and choices that are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.looks import CONTRAST, COVERED, CUT, rules_broken
from tests.support.pages import CHROMIUM, Town, settle, show, sign_in, views

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="apt-get install chromium"),
]


def administrator(page: Any, town: Town) -> None:
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")


# --- states -----------------------------------------------------------------------------------------------------------


def keys_of_a_tenant(page: Any, town: Town) -> None:
    show(page, town, "tenants")
    page.click("td >> text=bob")
    page.wait_for_selector("[aria-label=Keys] tbody tr")
    page.click("button >> text=New key")
    page.wait_for_selector(".notice code")
    page.click("button >> text=Revoke")
    page.wait_for_selector("[role=alert] >> text=Revoke it for good?")


def replies_side_by_side(page: Any, town: Town) -> None:
    show(page, town, f"chat?target={town.judged.id}")
    page.fill("label:has-text('samples') input", "3")
    page.click("summary >> text=System message")
    page.fill("textarea[aria-label='Message']", "2+2? " * 40)
    page.click("button >> text=Send")
    for side in (1, 2):
        page.wait_for_selector(f".side:nth-child({side}) .message.assistant >> nth=2")


def message_that_is_refused(page: Any, town: Town) -> None:
    show(page, town, "chat")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": "busy " * 60}))
    page.fill("textarea[aria-label='Message']", "2+2?")
    page.click("button >> text=Send")
    page.wait_for_selector("[role=alert] >> text=busy")


def dry_run(page: Any, town: Town) -> None:
    show(page, town, f"new?from={town.long.id}")
    page.wait_for_selector(".yaml >> text=longlong")
    page.click("button >> text=Dry run")
    page.wait_for_selector(".dry article >> nth=2")
    page.click("summary >> text=with every default")


def job_with_two_problems(page: Any, town: Town) -> None:
    show(page, town, "new")
    page.fill("details:has(summary:has-text('When the job ends')) label:has-text('Optimizer steps.') input", "-1")
    page.fill("label:has-text('policies') textarea", '{"main": {"rang": 4}}')
    page.click("button >> text=Submit")
    page.wait_for_selector("[role=alert] li >> nth=1")


def question_before_a_run_is_deleted(page: Any, town: Town) -> None:
    show(page, town, f"run/{town.long.id}")
    page.click("button:text-is('Delete')")
    page.wait_for_selector("[role=alert] >> text=Delete this run")


def runs_to_compare(page: Any, town: Town) -> None:
    show(page, town, "runs")
    for at in (0, 1):
        page.locator("tbody input[type=checkbox]").nth(at).check()
    page.wait_for_selector("a >> text=Compare 2 runs")


def search_without_finds(page: Any, town: Town) -> None:
    show(page, town, f"run/{town.done.id}/episodes?text={'nowhere' * 20}")
    page.wait_for_selector("text=No episode that is kept is like that.")


def list_without_an_answer(page: Any, town: Town) -> None:
    show(page, town, "runs")
    page.route("**/api/v1/runs?*", lambda route: route.abort())
    page.wait_for_selector("[role=alert] >> text=the service does not answer")


def view_that_is_refused(page: Any, town: Town) -> None:
    show(page, town, "run/" + "nobody" * 12)
    page.wait_for_selector("[role=alert] >> text=no job")


def meaning_of_the_charts(page: Any, town: Town) -> None:
    show(page, town, f"run/{town.judged.id}")
    page.click("summary >> text=Meaning of the charts")
    page.fill("label:has-text('steps from') input", "2")
    page.keyboard.press("Tab")
    page.wait_for_selector("button >> text=Show all steps")


def bar_of_the_histogram(page: Any, town: Town) -> None:
    show(page, town, f"run/{town.done.id}/step/1")
    page.locator(".histogram button:not(:disabled)").first.click()
    page.wait_for_selector(".histogram button[aria-pressed=true]")


def version_that_is_compared(page: Any, town: Town) -> None:
    show(page, town, f"run/{town.judged.id}/episode/{town.judged.groups()[0].group}-0")
    page.click("button >> text=policy")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".token.at")


STATES: list[Callable[[Any, Town], None]] = [
    keys_of_a_tenant, replies_side_by_side, message_that_is_refused, dry_run, job_with_two_problems,
    question_before_a_run_is_deleted, runs_to_compare, search_without_finds, list_without_an_answer,
    view_that_is_refused, meaning_of_the_charts, bar_of_the_histogram, version_that_is_compared,
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda one: one.__name__)
def test_every_state_keeps_the_rules_and_fits(page: Any, town: Town, state: Callable[[Any, Town], None]) -> None:
    if state is keys_of_a_tenant:
        administrator(page, town)
    else:
        sign_in(page, town, "ada")
    state(page, town)
    found = {}
    for width, scheme in ((1360, "light"), (360, "light"), (1360, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        settle(page)
        problems = rules_broken(page) + page.evaluate(CUT) + page.evaluate(COVERED) + page.evaluate(CONTRAST)
        if problems:
            found[width, scheme] = problems
    assert found == {}


# --- names, figures and groups of any size ----------------------------------------------------------------------------

NAMES = {"name", "tenant", "model", "base_model", "worker", "host", "site", "label", "policy", "engine", "device"}
"""Fields whose texts come from people or machines, and have no place to break."""

LARGE = {
    "step": 99_999, "steps": 1_000_000, "reward": -1234.567, "tokens_per_second": 98_765.4, "staleness": 12.345,
    "rewards": [-1234.567, 0.5, 1234.567], "state": "completed", "reason": "completed: " + "a sentence " * 20,
}  # fmt: skip
"""Fields of a run, each as wide as it can be."""


def long_names(value: Any) -> Any:
    """A document whose names have sixty letters."""
    if isinstance(value, list):
        return [long_names(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: inner + "w" * max(0, 60 - len(inner)) if key in NAMES and isinstance(inner, str) else long_names(inner)
        for key, inner in value.items()
    }


@pytest.mark.parametrize("width", [360, 768, 1360, 1920])
def test_no_name_and_no_figure_is_too_long_for_a_view(page: Any, town: Town, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    administrator(page, town)

    def lengthen(route: Any) -> None:
        answer = route.fetch()
        found = long_names(answer.json())
        if "/api/v1/runs?" in route.request.url:
            found["runs"] = [{**run, **LARGE, "cost": {**run["cost"], "cost": 98765.4321}} for run in found["runs"]]
        route.fulfill(response=answer, json=found)

    page.route(lambda url: "/api/v1/" in url and "stream" not in url, lengthen)
    found = {}
    for view in views(town):
        show(page, town, view)
        if problems := page.evaluate(CUT) + page.evaluate(COVERED):
            found[view] = problems
    page.unroute_all(behavior="wait")
    assert found == {}


def test_group_of_any_size_fits(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")

    def grow(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        for group in found["groups"]:
            group["members"] = group["members"] * 64
            group["reason"] = "dropped as it was too old for this run"
        route.fulfill(response=answer, json=found)

    page.route("**/groups?*", grow)
    show(page, town, f"run/{town.done.id}/steps")
    assert page.locator("svg.dots").first.locator("rect").count() == 256
    assert page.evaluate(CUT) == []


# --- choices ----------------------------------------------------------------------------------------------------------

TASK = """
  const give = (kind) => (box, value) => { box.value = value; box.dispatchEvent(new Event(kind, { bubbles: true })); };
  const choose = give("change"), type = give("input"), named = (label) => document.querySelector(`[aria-label="${label}"]`);
  const field = (label) => [...document.querySelectorAll("label")].find((one) => one.textContent.trim().startsWith(label)).querySelector("input");
"""  # noqa: E501

PAIRS = {
    "models of a chat": (
        "chat",
        "choose(named('Model on the left'), ''); choose(named('Model on the right'), RUN)",
        "named('Model on the left').value === '' && named('Model on the right').value === RUN",
    ),
    "options of a chat": (
        "chat",
        "type(field('samples'), '3'); type(field('temperature'), '0.5')",
        "field('samples').value === '3' && field('temperature').value === '0.5'",
    ),
    "runs to compare": (
        "runs",
        "document.querySelectorAll('tbody input').forEach((one, at) => { if (at < 2) one.click(); })",
        "document.querySelector('main').textContent.includes('Compare 2 runs')",
    ),
    "state and order of runs": (
        "runs",
        "choose(named('Filter by state'), 'completed'); document.querySelector('th button').click()",
        "location.hash.includes('state=completed') && location.hash.includes('order=name')",
    ),
    "filters of episodes": (
        "run/RUN/episodes",
        "field('failed only').click(); choose(field('reward from'), '0.5')",
        "location.hash.includes('failed=true') && location.hash.includes('min_reward=0.5')",
    ),
    "first and last step": (
        "run/RUN",
        "choose(field('steps from'), '2'); choose(field('to'), '4')",
        "field('steps from').value === '2' && field('to').value === '4'",
    ),
}
"""A view, two choices that are made before it is drawn again, and whether both count."""


@pytest.mark.parametrize("name", PAIRS)
def test_two_choices_at_once_both_count(page: Any, town: Town, name: str) -> None:
    view, both, kept = (part.replace("RUN", f"'{town.done.id}'") for part in PAIRS[name])
    sign_in(page, town, "ada")
    show(page, town, view.replace("'", ""))
    page.evaluate(f"() => {{ {TASK} {both}; }}")
    settle(page)
    page.wait_for_function(f"() => {{ {TASK} return {kept}; }}")


def test_a_choice_that_is_not_in_its_list_is_shown(page: Any, town: Town) -> None:
    """The address or an earlier list gave it, and the control shows what it does."""
    sign_in(page, town, "ada")
    for view, control, value in (
        ("chat?target=job-gone", "Model on the right", "job-gone"),
        (f"chat?target={town.done.id}@99", "Model on the right: version", "99"),
        (f"chat?target={town.judged.id}/gone", "Model on the right: policy", "gone"),
        ("runs?state=strange", "Filter by state", "strange"),
    ):
        show(page, town, "usage")  # a chat that is open keeps its models
        show(page, town, view)
        assert page.input_value(f"[aria-label='{control}']") == value, view


def test_kind_of_events_is_kept_where_a_later_list_has_none(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    first = [{"time": 1.0 + at, "kind": "evaluation" if at < 50 else "state", "text": str(at)} for at in range(100)]
    answers = [(first, "1"), ([{"time": 1.0, "kind": "state", "text": "alone"}], "")]

    def answer(route: Any) -> None:
        rows, after = answers.pop(0)
        route.fulfill(json=rows, headers={"X-Next-Page": after} if after else {})

    page.route("**/events?*", answer)
    show(page, town, f"run/{town.done.id}/events")
    page.select_option("[aria-label='Kind of event']", "evaluation")
    page.click("button >> text=Older events")
    page.wait_for_selector("text=No event of this kind is among these.")
    assert page.input_value("[aria-label='Kind of event']") == "evaluation"


def test_bar_that_is_chosen_stays_while_its_list_is_read_again(page: Any, town: Town) -> None:
    """Later rewards would give the bars other edges."""
    sign_in(page, town, "ada")
    most = [1.0]

    def spread(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        members = [one for group in found["groups"] for one in group["members"]]
        for at, one in enumerate(members):
            one["reward"] = at / len(members) * most[0]
        route.fulfill(response=answer, json=found)

    page.route("**/groups?*", spread)
    show(page, town, f"run/{town.done.id}/steps")
    bar = page.locator(".histogram button").nth(2)
    bar.click()
    page.wait_for_selector(".histogram button[aria-pressed=true]")
    name, groups = bar.get_attribute("title"), page.locator("tbody tr").count()
    most[0] = 7.0
    with page.expect_response("**/groups?*"):
        pass
    page.wait_for_function("count => document.querySelectorAll('tbody tr').length !== count", arg=groups)
    pressed = page.locator(".histogram button[aria-pressed=true]")
    assert pressed.count() == 1 and pressed.get_attribute("title") == name
    pressed.click()
    page.wait_for_selector(".histogram button[aria-pressed=true]", state="detached")
    page.unroute_all(behavior="wait")


def test_field_that_is_emptied_stays_in_view(page: Any, town: Town) -> None:
    """It is the only one of its part that has a value, and another one is typed next."""
    sign_in(page, town, "ada")
    show(page, town, "new")
    steps = page.locator("details:has(summary:has-text('When the job ends')) label:has-text('Optimizer steps.') input")
    steps.fill("")
    page.wait_for_function("() => !document.querySelector('.yaml').textContent.includes('stop')")
    assert steps.is_visible()
    steps.press_sequentially("7")
    page.wait_for_selector(".yaml >> text=steps: 7")


def test_drag_between_two_steps_shows_no_empty_charts(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    show(page, town, f"run/{town.done.id}")
    page.locator(".chart .u-over").first.scroll_into_view_if_needed()
    box = page.locator(".chart .u-over").first.bounding_box()
    step = box["width"] / 5  # pixels between two of six steps

    def drag(first: float, last: float) -> None:
        page.mouse.move(box["x"] + first * step, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + last * step, box["y"] + 50, steps=4)
        page.mouse.up()
        settle(page)

    drag(1.2, 1.8)
    assert page.locator("button >> text=Show all steps").count() == 0
    drag(0.8, 2.2)
    page.wait_for_selector("button >> text=Show all steps")
    assert page.locator("[aria-label='Newest steps'] tbody tr").count() == 2


def test_pages_of_a_list_in_another_order_are_not_called_newer_and_older(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")

    def many(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "total": 120})

    page.route("**/api/v1/runs?*", many)
    for view, names in (("runs", ["Newer", "Older"]), ("runs?order=name&descending=false", ["Previous", "Next"])):
        show(page, town, view)
        page.wait_for_selector(f".bar:has-text('of 120') button >> text={names[0]}")
        assert page.locator(".bar:has-text('of 120') button").all_inner_texts() == names
    page.unroute_all(behavior="wait")
