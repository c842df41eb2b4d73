"""The page in a real browser (Debian's chromium, driven by Playwright): what a person does with it."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from tests.support.faces import job
from tests.support.looks import rules_broken
from tests.support.pages import (
    CHROMIUM,
    MARKUP,
    Town,
    endless,
    new_context,
    of_run,
    settle,
    show,
    sign_in,
    sign_out,
    views,
)
from tests.support.traces import check
from tests.support.waiting import until

from rookery.client import Client
from rookery.errors import Unauthorized

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="apt-get install chromium"),
]


def test_tenant_signs_in_and_sees_only_its_runs(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.click("tbody >> text=sums")
    page.wait_for_selector(".chart canvas")
    assert page.locator(".chart").count() >= 5
    assert "6 of 6" in page.locator(".facts").inner_text()
    sign_out(page)
    sign_in(page, town, "bob")
    page.wait_for_selector("text=No runs yet")
    page.goto(f"{town.service.url}/#/run/{town.done.id}")
    page.wait_for_selector("[role=alert] >> text=no job")


def test_wrong_key_is_refused_in_words(page: Any, town: Town) -> None:
    page.goto(town.service.url)
    page.fill("#key", "tml-wrong")
    page.click("button.main")
    page.wait_for_selector("[role=alert] >> text=the API key is unknown")


def test_link_of_rookery_open_signs_in(page: Any, town: Town) -> None:
    page.goto(town.ada.sign_in_link())
    page.wait_for_selector("tbody >> text=sums")
    assert "link" not in page.url


def test_link_is_not_used_in_place_of_a_sign_in_without_consent(page: Any, town: Town) -> None:
    sign_in(page, town, "bob")
    link = town.ada.sign_in_link()
    page.goto("about:blank")
    page.goto(link)
    page.click("[role=alert] >> text=Stay signed in as bob")
    page.wait_for_selector("[role=alert]", state="detached")
    assert page.locator(".who .name").inner_text() == "bob"
    page.goto("about:blank")
    page.goto(link)
    page.click("[role=alert] >> text=Use the link")
    page.wait_for_selector(".who .name >> text=ada")
    page.goto("about:blank")
    page.goto(link)
    page.click("[role=alert] >> text=Use the link")
    page.wait_for_selector("[role=alert] >> text=the link was used")


def test_long_list_is_read_page_by_page(page: Any, town: Town) -> None:
    def of_many(route: Any) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "runs": every.json()["runs"], "total": 120})

    sign_in(page, town, "ada")
    every = page.request.get(f"{town.service.url}/api/v1/runs")
    page.route("**/api/v1/runs?*", of_many)
    page.reload()
    for button, shown in (
        ("Older", "51 to 100"),
        ("Older", "101 to 120"),
        ("Newer", "51 to 100"),
        ("Newer", "1 to 50"),
    ):
        page.click(f"button >> text={button}")
        page.wait_for_selector(f"text={shown} of 120")
    assert page.locator("button >> text=Newer").is_disabled()
    page.unroute_all(behavior="wait")


def test_charts_follow_a_run(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    with endless(town, "growing") as running:
        page.goto(f"{town.service.url}/#/run/{running.id}")
        page.wait_for_selector("text=● live")
        step = page.locator(".chart .legend b").first
        first = int(step.inner_text())
        page.wait_for_function(f"() => Number(document.querySelector('.chart .legend b').textContent) > {first + 2}")
        running.cancel()
        page.wait_for_selector(".badge.cancelled")


class Refusals:
    """Answers requests by 503 and 429 in turn, until both were sent and the test has seen what the page shows then."""

    def __init__(self, error: str) -> None:
        self.error = error
        self.sent: list[int] = []
        self.over = False

    def __call__(self, route: Any) -> None:
        if self.over:
            route.continue_()
        else:
            self.sent.append((503, 429)[len(self.sent) % 2])
            route.fulfill(status=self.sent[-1], json={"error": self.error})

    def end(self, page: Any) -> None:
        while len(self.sent) < 2:
            page.wait_for_event("response", lambda answer: answer.status in (503, 429))
        self.over = True


def test_charts_continue_after_refusals_and_a_hidden_page(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    refusals = Refusals("busy")

    def hide(hidden: bool) -> None:
        page.evaluate(
            """hidden => {
                Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
                document.dispatchEvent(new Event("visibilitychange"));
            }""",
            hidden,
        )

    page.route("**/metrics/stream?*", refusals)
    with endless(town, "refused") as running:
        page.goto(f"{town.service.url}/#/run/{running.id}")
        page.wait_for_selector("text=The charts have had no connection since")
        refusals.end(page)
        page.wait_for_selector("text=● live")
        assert page.locator("text=have had no connection").count() == 0
        with page.expect_event("requestfailed", lambda one: "metrics/stream" in one.url):
            hide(True)
        step = int(page.locator(".chart .legend b").first.inner_text())
        with page.expect_request(lambda one: "metrics/stream" in one.url):
            hide(False)
        page.wait_for_function(f"() => Number(document.querySelector('.chart .legend b').textContent) > {step + 1}")
        running.cancel()
        page.wait_for_selector(".badge.cancelled")


def test_deleted_run_is_named_while_it_is_viewed(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    short = town.ada.submit(job(name="short"))
    assert short.wait().state == "completed"
    page.goto(f"{town.service.url}/#/run/{short.id}")
    page.wait_for_selector(".chart canvas")
    short.delete()
    page.wait_for_selector("[role=status] >> text=This run is deleted. The figures below are from before.")
    page.wait_for_selector(".chart canvas")  # drawn again, in a later frame


def test_page_waits_for_a_service_that_is_starting(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    refusals = Refusals("starting")
    page.route("**/api/v1/account", refusals)
    page.reload()
    page.wait_for_selector("[role=alert] >> text=starting")
    assert page.locator("#key").count() == 0, "it is signed in"
    refusals.end(page)
    page.wait_for_selector("header.top")
    assert page.locator("[role=alert]").count() == 0


def test_revoked_key_of_an_open_page_is_named(page: Any, town: Town) -> None:
    with Client(town.service.url, town.service.key) as admin:
        town.keys["short"] = admin.add_key("bob", "laptop").key
        sign_in(page, town, "short")
        page.wait_for_selector("text=No runs yet")
        admin.revoke_key("bob", next(one.id for one in admin.keys("bob") if one.label == "laptop"))
    page.wait_for_selector("[role=alert] >> text=the API key 'laptop' was revoked")
    assert page.locator("#key").count() == 1


def test_tab_follows_a_sign_in_of_another_tab(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    other = page.context.new_page()
    other.goto(town.service.url)
    sign_out(other)
    sign_in(other, town, "bob")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector(".who .name >> text=bob")
    page.wait_for_selector("text=No runs yet")
    other.close()


@pytest.mark.parametrize("hours", [-5, 5])
def test_reader_with_a_wrong_clock_reads_the_true_age_of_a_run(chromium: Any, town: Town, hours: int) -> None:
    context = new_context(chromium)
    page = context.new_page()
    page.add_init_script(f"const own = Date.now; Date.now = () => own() + {hours * 3_600_000};")
    sign_in(page, town, "ada")
    age = page.locator("tr", has_text="sums").locator("td").last
    page.wait_for_selector("tbody >> text=sums")
    assert "h" not in age.inner_text() and age.inner_text() != "0 s ago"
    context.close()


WHITE = """() => {
  const canvas = document.querySelector("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Uint32Array(data.buffer).includes(0xffffffff);
}"""
"""Whether a picture has something white."""


def test_charts_change_their_colors_with_the_system(page: Any, town: Town) -> None:
    page.emulate_media(color_scheme="light")
    sign_in(page, town, "ada")
    drawn = "() => document.querySelector('canvas').toDataURL()"
    for view in ("", "/timeline"):
        show(page, town, f"run/{town.done.id}{view}")
        light = page.evaluate(drawn)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"light => ({drawn})() !== light", arg=light)
        settle(page)
        assert not page.evaluate(WHITE), "such as the dots of evaluations"
        page.emulate_media(color_scheme="light")
        page.wait_for_function(f"light => ({drawn})() === light", arg=light)


def test_strange_values_do_not_end_the_page(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    of_groups = f"**/api/v1/jobs/{town.done.id}/groups?*"

    def strange(route: Any) -> None:
        answer = route.fetch()
        found = answer.json()
        parts = [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]
        found["groups"][0]["prompt"] = {"messages": [{"role": "user", "content": parts}, None, "plain"]}
        route.fulfill(response=answer, json=found)

    page.route(of_groups, strange)
    page.goto(f"{town.service.url}/#/run/{town.done.id}/steps")
    page.wait_for_selector("tbody >> text=in parts null plain")
    page.unroute(of_groups)
    page.route(of_groups, lambda route: route.fulfill(json={"groups": None, "total": 1}))
    page.goto(f"{town.service.url}/#/run/{town.done.id}/step/1")
    page.wait_for_selector("[role=alert] >> text=The page cannot show this")
    page.goto(f"{town.service.url}/#/run/100%")
    page.wait_for_selector("[role=alert] >> text=no job")
    page.goto(f"{town.service.url}/#/constructor")
    page.wait_for_selector("text=There is no such view")
    page.wait_for_function("() => document.title === 'No such view – Rookery'")
    page.click("nav >> text=Runs")
    page.wait_for_selector("tbody tr")
    page.wait_for_function("() => document.title === 'Runs – Rookery'")


def test_comparison_grows_by_the_rows_of_later_steps(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    with endless(town, "compared") as running:
        for _ in running.metrics():
            break
        with page.expect_request(lambda one: f"{running.id}/metrics" in one.url and "after=-1" not in one.url) as later:
            page.goto(f"{town.service.url}/#/compare/{town.done.id}/{running.id}")
        assert int(later.value.url.partition("after=")[2].partition("&")[0]) >= 0
        step = page.locator(".chart .legend b").first
        first = int(step.inner_text())
        page.wait_for_function(f"() => Number(document.querySelector('.chart .legend b').textContent) > {first}")
        assert page.locator(".chart .legend").first.locator(".swatch").count() == 2


def test_timeline_zooms_from_the_whole_to_a_span_and_gives_the_trace(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.click("nav >> text=Timeline")
    page.click("text=All that is kept")
    settle(page)
    assert "commits" in page.locator("table").inner_text()
    assert {"worker scripted", "sums"} <= set(page.locator("table td:first-child").all_inner_texts())
    page.locator(".lanes canvas").focus()
    for _ in range(30):
        page.keyboard.press("+")
    page.wait_for_selector("text=5 ms")
    page.click("text=All that is kept")
    settle(page)
    whole, length = page.locator(".lanes canvas").bounding_box(), page.locator(".bar > .muted.small").inner_text()
    page.mouse.move(whole["x"] + whole["width"] - 200, whole["y"] + 60)
    page.mouse.down()
    page.mouse.move(whole["x"] + whole["width"] - 20, whole["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function("length => document.querySelector('.bar > .muted.small').innerText !== length", arg=length)
    with page.expect_download() as download:
        page.click("text=Download trace")
    check(json.loads(Path(download.value.path()).read_text()))
    page.goto(f"{town.service.url}/#/run/{town.done.id}/timeline")
    page.wait_for_selector("td >> text=sums")


def test_work_of_others_has_no_name_in_the_timeline(page: Any, town: Town) -> None:
    sign_in(page, town, "bob")
    page.goto(f"{town.service.url}/#/timeline")
    page.click("text=All that is kept")
    settle(page)
    assert page.locator("th >> text=busy for others").is_visible()
    assert page.locator("td >> text=scripted").is_visible()
    assert "sums" not in page.content() and town.done.id not in page.content()


def test_click_on_a_step_leads_to_its_groups_and_to_the_tokens_of_an_answer(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    show(page, town, f"run/{town.done.id}")
    page.locator(".chart .u-over").first.click()  # in its middle, on the chart that is there then
    page.wait_for_selector("h2 >> text=Groups of step")
    assert page.locator("tbody tr").count() == 3
    bars = page.locator(".histogram button")
    assert sum(int(bars.nth(at).locator("span").first.inner_text()) for at in range(bars.count())) == 12
    page.locator("tbody tr a").first.click()
    page.wait_for_selector("h2 >> text=4 answers")
    advantages = page.locator(".answer >> text=/advantage/").count()
    assert page.locator(".answer").count() == 4 and advantages in (0, 4)
    page.click("text=Answer 2")
    page.wait_for_selector(".message.assistant >> text=/reward [+]?[01]/")
    assert page.locator(".mark.worker").inner_text().strip() == "▸ scripted"
    assert page.locator(".token.masked").count() > 10 and page.locator(".token:not(.masked)").count() in (2, 5)
    page.locator(".token:not(.masked)").first.hover()
    page.wait_for_selector(".about >> text=/log-probability -0.5.*engine/")


def test_search_finds_texts_and_failures_are_listed_with_their_error(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episodes")
    page.wait_for_selector(".answer")
    page.fill("[type=search]", "fiv")
    page.click("button >> text=Search")
    page.wait_for_function(
        """() => {
          const found = [...document.querySelectorAll(".answer pre")].map((one) => one.textContent);
          return found.length > 0 && found.every((text) => text === "five");
        }"""
    )
    page.fill("[type=search]", "nowhere to be found")
    page.click("button >> text=Search")
    page.wait_for_selector("text=No episode that is kept is like that.")


TYPE = """
  const type = (text) => {
    const box = document.querySelector("[type=search]");
    box.value = text;
    box.dispatchEvent(new Event("input", { bubbles: true }));
  };
"""


def test_text_that_is_typed_while_a_search_arrives_is_kept(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.evaluate(f"""() => {{
      {TYPE}
      addEventListener("hashchange", () => type("{town.done.id}"), {{ once: true }});
      type("nothing");
    }}""")
    page.wait_for_url(lambda url: url.endswith(f"text={town.done.id}"))
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episodes")
    page.wait_for_selector(".answer")
    page.fill("[type=search]", "fiv")
    page.evaluate(f"""() => {{
      {TYPE}
      addEventListener("hashchange", () => type("two"), {{ once: true }});
      document.querySelector("form.bar").requestSubmit();
    }}""")
    page.wait_for_url(lambda url: url.endswith("text=fiv"))
    page.click("button >> text=Search")
    page.wait_for_url(lambda url: url.endswith("text=two"))
    page.go_back()
    page.wait_for_function("() => document.querySelector('[type=search]').value === 'fiv'")


def test_search_continues_until_it_has_a_page_of_finds(page: Any, town: Town) -> None:
    """The service ends a search after a time, with fewer finds than asked for or none; a failure can be repeated."""
    asked: list[str] = []

    def in_parts(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) == 4:
            return route.fulfill(status=503, json={"error": "busy"})
        found = route.fetch(url=route.request.url.partition("&before=")[0]).json()
        kept, more = found["episodes"][:8] if len(asked) % 2 else [], len(asked) < 7
        shown = [{**one, "episode": f"{one['episode']}-{len(asked)}"} for one in kept]
        return route.fulfill(json={"episodes": shown, "next": str(len(asked)) if more else None, "reached": 1.0})

    sign_in(page, town, "ada")
    page.route("**/episodes?*text=fiv*", in_parts)
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episodes?text=fiv")
    page.wait_for_selector("[role=alert] >> text=busy")
    assert len(asked) == 4 and page.locator(".answer").count() == 16
    page.click("button >> text=Try again")
    page.click("button >> text=Older episodes")
    page.wait_for_selector("button >> text=Older episodes", state="detached")
    page.wait_for_selector("text=Searching", state="detached")
    assert page.locator(".answer").count() == 32 and "before=6" in asked[-1]
    page.unroute_all(behavior="wait")
    assert page.input_value("[type=search]") == "fiv"
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episodes?text=nowhere")
    page.wait_for_selector("text=No episode that is kept is like that.")
    assert page.input_value("[type=search]") == "nowhere"


def test_prompts_with_markup_are_shown_as_text(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    group = town.done.groups()[0].group
    page.goto(f"{town.service.url}/#/run/{town.done.id}/group/{group}")
    page.wait_for_selector("pre >> text=onerror")
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episode/{group}-0")
    page.wait_for_selector(".message.user >> text=<script>")
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episodes")
    page.wait_for_selector(".prompt >> text=onerror")
    assert page.locator("main img, main script").count() == 0


def test_dead_page_changes_nothing(chromium: Any, town: Town) -> None:
    """Browsers that vanish in the middle of a stream leave no follower behind."""
    with endless(town, "left") as running:
        for _ in range(3):
            context = new_context(chromium)
            page = context.new_page()
            sign_in(page, town, "ada")
            page.goto(f"{town.service.url}/#/run/{running.id}")
            page.wait_for_selector("text=● live")
            context.close()
        before = running.show().step
        until(lambda: running.show().step > before)


def test_job_is_tried_submitted_watched_paused_resumed_and_cancelled(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/new?from={town.done.id}")
    page.wait_for_selector(".yaml >> text=base_model: qwen3-0.6b")
    page.fill("label:has-text('name') input >> nth=0", "by-form")
    page.fill("details:has(summary:has-text('When the job ends')) label:has-text('Optimizer steps.') input", "1000000")
    page.click("button >> text=Dry run")
    page.wait_for_selector(".dry article >> nth=2")
    assert "<|im_start|>user" in page.locator(".dry article pre").first.inner_text()
    page.click("button >> text=Submit")
    page.wait_for_selector("h1 >> text=by-form")
    page.wait_for_selector(".chart canvas")
    page.click("button >> text=Pause")
    page.wait_for_selector(".badge.paused")
    page.click("button >> text=Resume")
    page.wait_for_selector(".badge.running")
    page.click("button:text-is('Cancel')")
    page.click("button:text-is('No')")
    page.click("button:text-is('Cancel')")
    page.click("button:text-is('Yes, cancel')")
    page.wait_for_selector(".badge.cancelled")
    page.click("button:text-is('Delete')")
    page.click("button:text-is('Yes, delete')")
    page.wait_for_selector("h1 >> text=Runs")
    assert "by-form" not in [view.name for view in town.ada.views()]


def test_a_field_that_is_not_json_is_named_before_anything_is_sent(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/new")
    page.wait_for_selector(".yaml")
    page.fill("label:has-text('environment') textarea", "{ nothing")
    before = len(town.ada.views())
    page.click("button >> text=Submit")
    page.wait_for_selector("[role=alert] >> text=environment: not JSON")
    assert len(town.ada.views()) == before


def test_a_refused_job_has_a_reason(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/new")
    page.wait_for_selector(".yaml")
    page.fill("details:has(summary:has-text('When the job ends')) label:has-text('Optimizer steps.') input", "-1")
    page.click("button >> text=Submit")
    page.wait_for_selector("[role=alert] >> text=stop.steps")


def test_number_that_is_typed_arrives_as_it_is_written(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/new")
    page.wait_for_selector(".yaml")
    field = page.locator("details:has(summary:has-text('sampling')) label:has-text('temperature') input").first
    if not field.is_visible():
        page.click("summary:has-text('sampling')")
    for typed, written in (("0.05", "0.05"), ("1.50", "1.5"), ("1e-3", "0.001"), ("10.05", "10.05")):
        field.fill("")
        field.press_sequentially(typed)
        page.wait_for_selector(f".yaml >> text=temperature: {written}")
        assert float(field.input_value()) == float(typed)


def test_enter_that_ends_a_composition_of_letters_sends_nothing(page: Any, town: Town) -> None:
    """Where letters are composed of several keys, as in Chinese or Japanese, Enter takes the composed ones."""
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/chat")
    page.wait_for_selector("text=Its replies stand here")
    page.fill("textarea[aria-label='Message']", "にほん")
    press = """(one, composing) => one.dispatchEvent(
        new KeyboardEvent("keydown", { key: "Enter", bubbles: true, isComposing: composing }))"""
    message = page.locator("textarea[aria-label='Message']")
    message.evaluate(press, True)
    assert message.input_value() == "にほん"
    message.evaluate(press, False)
    page.wait_for_selector(".message.user >> text=にほん")


def test_chat_shows_base_and_version_side_by_side(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/chat?target={town.done.id}")
    page.wait_for_selector("select[aria-label='Model on the right: version'] option >> nth=2", state="attached")
    page.wait_for_selector("[placeholder='A message to both']")
    page.fill("label:has-text('samples') input", "3")
    page.fill("textarea[aria-label='Message']", "2+2?")
    page.click("button >> text=Send")
    for side in (1, 2):
        page.wait_for_selector(f".side:nth-child({side}) .message.assistant >> nth=2")
    tokens = page.locator(".side .token")
    assert tokens.count() >= 6 and tokens.first.get_attribute("title") == "-0.5000 nats"
    page.select_option("select[aria-label='Model on the right: version']", "6")
    with page.expect_response("**/v1/chat/completions") as replayed:
        page.click(".side:nth-child(2) >> text=Replay")
    assert replayed.value.request.post_data_json["model"].endswith("@6")
    page.wait_for_selector(".side:nth-child(2) .message.assistant >> nth=2")
    page.fill("textarea[aria-label='Message']", "And 3+3?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".side:nth-child(1) .message.user >> nth=1")


def test_message_that_was_not_answered_can_be_sent_again(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/chat")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": "busy"}))
    page.wait_for_selector("text=Its replies stand here")
    page.fill("textarea[aria-label='Message']", "2+2?")
    page.keyboard.press("Enter")
    page.wait_for_selector("[role=alert] >> text=busy")
    assert page.locator(".message").count() == 0
    page.unroute_all(behavior="wait")
    page.wait_for_function("() => document.querySelector(\"textarea[aria-label='Message']\").value === '2+2?'")
    page.fill("label:has-text('temperature') input", "")
    page.keyboard.press("Tab")
    page.click("summary >> text=System message")
    page.fill("textarea[aria-label='System message']", "Count.")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("button >> text=Send")
    asked = sent.value.post_data_json
    assert "temperature" not in asked and asked["messages"][0] == {"role": "system", "content": "Count."}
    page.wait_for_selector(".message.assistant .token")


def test_episode_of_an_agent_names_its_branches_and_untrained_replies(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.driven.id}/episode/{town.episodes[1]}")
    page.wait_for_selector("h3 >> text=Another conversation of the agent")
    assert page.locator(".message.assistant >> text=/turn 1, not trained on/").count() == 1
    page.goto(f"{town.service.url}/#/run/{town.driven.id}/episode/{town.episodes[0]}")
    page.wait_for_selector(".notice.bad >> text=onerror")


def test_policies_are_named_with_their_colors(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    group = town.judged.groups()[0].group
    page.goto(f"{town.service.url}/#/run/{town.judged.id}/group/{group}")
    page.wait_for_selector(".answer .speaker >> text=solver")
    page.wait_for_selector(".answer .speaker >> text=judge")
    page.goto(f"{town.service.url}/#/run/{town.judged.id}/episode/{group}-0")
    page.wait_for_selector(".message.p0 >> text=solver")
    page.wait_for_selector(".message.p1 >> text=judge")
    page.click("button >> text=policy")
    page.wait_for_selector(".token.v0")
    page.wait_for_selector(".token.v1")


def test_adapter_is_downloaded_with_the_cookie(page: Any, town: Town, tmp_path: Path) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.done.id}")
    with page.expect_download() as started:
        page.click("text=Download adapter")
    started.value.save_as(tmp_path / "adapter.tar")
    with tarfile.open(tmp_path / "adapter.tar") as archive:
        assert "adapter_config.json" in archive.getnames()


def test_run_without_a_policy_called_main_has_downloads_chat_and_a_run_from_it(page: Any, town: Town) -> None:
    policies = {"solver": {"rank": 4, "targets": ["q"]}, "judge": {"train": False, "base": True}}
    run = town.ada.submit(job(name="solved", policies=policies))
    assert run.wait().state == "completed"
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{run.id}")
    with page.expect_download() as started:
        page.click("text=Download adapter")
    assert started.value.suggested_filename == f"{run.id}-solver-2.tar"
    page.click("text=New run from version 2")
    page.wait_for_selector(".yaml >> text=policy: solver")
    assert "judge" in page.locator(".yaml").inner_text()
    page.goto(f"{town.service.url}/#/chat?target={run.id}")
    page.select_option("select[aria-label='Model on the right: policy']", "solver")
    page.select_option("select[aria-label='Model on the right: version']", "1")
    page.fill("textarea[aria-label='Message']", "2+2?")
    page.click("button >> text=Send")
    page.wait_for_selector(".side:nth-child(2) .message.assistant .token")


def test_administrator_sees_fleet_usage_and_tenants_and_makes_a_key(page: Any, town: Town) -> None:
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    page.wait_for_selector("tbody td >> text=ada")
    page.click("nav >> text=Fleet")
    page.wait_for_selector("tbody >> text=scripted")
    page.wait_for_selector(".badge.serving")
    page.click("nav >> text=Usage")
    page.wait_for_selector("tbody >> text=sums")
    with page.expect_download() as started:
        page.click("text=Download as CSV")
    assert started.value.suggested_filename == "usage.csv"
    page.click("nav >> text=Tenants")
    page.fill("[aria-label='Name of a new tenant']", "eve")
    page.click("button >> text=Add tenant")
    page.click("button >> text=New key")
    key = page.locator(".notice code").inner_text()
    page.select_option("section select", "jobs")
    page.fill("[aria-label='Value of the limit']", "2")
    page.click("button >> text=Set")
    page.wait_for_selector("td >> text=2 *")
    with Client(town.service.url, key) as eve:
        assert eve.views() == []
        page.click("button >> text=Revoke")
        page.wait_for_selector("[role=alert] >> text=Revoke it for good?")
        assert page.evaluate("document.activeElement.textContent") == "No"
        page.keyboard.press("Enter")
        page.wait_for_selector("[role=alert]", state="detached")
        assert page.evaluate("document.activeElement.textContent") == "Revoke" and eve.views() == []
        page.click("button >> text=Revoke")
        page.click("button >> text=Yes, revoke")
        page.wait_for_selector("td >> text=/^revoked/")
        with pytest.raises(Unauthorized):
            eve.views()


def test_list_has_both_keys_where_the_second_is_made_before_the_first_is_shown(page: Any, town: Town) -> None:
    """Each of the two reads the list again."""
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    show(page, town, "tenants")
    page.click("td >> text=bob")
    page.wait_for_selector("[aria-label=Keys] tbody tr")
    before = page.locator("[aria-label=Keys] tbody tr").count()
    asked: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.method == "POST":
            asked.append(route)
        if len(asked) != 2 or route is not asked[1]:
            route.continue_()

    page.route("**/api/v1/tenants/*/keys*", hold)
    page.evaluate(
        """() => {
            const make = [...document.querySelectorAll("button")].find((one) => one.textContent === "New key");
            make.click();
            make.click();
        }"""
    )
    page.wait_for_selector(f"[aria-label=Keys] tbody tr >> nth={before}")
    asked[1].continue_()
    page.wait_for_selector(f"[aria-label=Keys] tbody tr >> nth={before + 1}")


def test_events_and_alarms_of_a_run_are_shown(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.done.id}/events")
    page.wait_for_selector("tbody td >> text=completed: 6 steps")


def test_searched_markup_is_shown_as_text(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.click("nav >> text=Usage")
    page.click("nav >> text=Runs")
    for text in ("su", MARKUP):
        page.fill("[type=search]", text)
        page.wait_for_url(lambda url, text=text: parse_qs(url.partition("?")[2]).get("text") == [text])
    page.wait_for_selector("text=No run is like that.")
    page.go_back()
    page.wait_for_selector("h1 >> text=Usage")


# --- for everyone -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_passes_the_accessibility_rules(chromium: Any, town: Town, scheme: str) -> None:
    context = new_context(chromium, viewport={"width": 1360, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(town.service.url)
    page.wait_for_selector("#key")
    assert rules_broken(page) == []
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    found = {}
    for view in views(town):
        show(page, town, view)
        if problems := rules_broken(page):
            found[view] = problems
    context.close()
    assert found == {}


def test_phone_needs_no_sideways_scrolling(chromium: Any, town: Town) -> None:
    context = new_context(chromium, viewport={"width": 390, "height": 800})
    page = context.new_page()
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    for view in views(town):
        show(page, town, view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    context.close()


def test_keyboard_alone_reaches_a_token(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episode/{town.done.groups()[0].group}-0")
    page.wait_for_selector(".tokens")
    page.focus(".tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".token.at")
    for _ in range(60):  # to the first token of the prompt, which is above what is seen
        page.keyboard.press("ArrowLeft")
    inside = """one => {
        const [box, own] = [one.parentElement.getBoundingClientRect(), one.getBoundingClientRect()];
        return own.top >= box.top - 1 && own.bottom <= box.bottom + 1;
    }"""
    assert page.locator(".token.at").count() == 1 and page.locator(".token.at").evaluate(inside)
    page.goto(f"{town.service.url}/#/runs")
    page.wait_for_selector("tbody a")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('tbody a')"):
            break
    page.keyboard.press("Enter")
    page.wait_for_selector(".facts")
    page.wait_for_function("() => document.activeElement === document.querySelector('main')")


def test_each_line_has_the_direction_of_its_letters(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    group = town.done.groups()[0].group

    def arabic(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "prompt": "plain\n\u0633\u0624\u0627\u0644"})

    page.route(f"**/groups/{group}", arabic)
    page.goto(f"{town.service.url}/#/run/{town.done.id}/group/{group}")
    page.wait_for_selector("pre >> text=plain")
    sides = page.locator("section.panel pre").first.evaluate(
        """one => [0, 6].map((at) => {
            const range = document.createRange(), box = one.getBoundingClientRect();
            range.setStart(one.firstChild, at);
            range.setEnd(one.firstChild, at + 4);
            const own = range.getBoundingClientRect();
            return own.left - box.left < box.right - own.right ? "left" : "right";
        })"""
    )
    assert sides == ["left", "right"]


def test_prompts_errors_and_warnings_with_markup_are_text_everywhere(page: Any, town: Town) -> None:
    """Whatever stands in a job, no view makes an element of it."""
    sign_in(page, town, "ada")
    every = {*views(town), *of_run(town.driven), *of_run(town.judged), f"new?from={town.judged.id}"}
    for view in sorted(every):
        show(page, town, view)
        assert page.locator("main img, main script, main b:text-is('b')").count() == 0, view
    page.goto(f"{town.service.url}/#/run/{town.driven.id}/events")
    page.wait_for_selector("main :text('sinks.0')")
    assert "<img src=x" in page.inner_text("main")
