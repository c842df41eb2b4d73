"""The page for every reader, on each view: nothing is cut or covered, contrast is enough, the keyboard reaches every
control, and a view that waits says so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.looks import CONTRAST, COVERED, CUT, TOOLS
from tests.support.pages import CHROMIUM, Town, new_context, show, sign_in, sign_out, views

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="apt-get install chromium"),
]

NUMBERED = f"""() => {{ {TOOLS}
  window.numbered = controls();
  document.activeElement.blur();
  return window.numbered.map((one) => {{
    const label = [...(one.labels ?? [])].map((label) => label.textContent).join(" ");
    return [about(one), (one.getAttribute("aria-label") || label || one.innerText || one.title || one.querySelector("img")?.alt || "").trim()];
  }});
}}"""  # noqa: E501


OF_A_MOUSE = re.compile(r"(?i)\b(mouse|point at|drag to zoom|double-click|click|arrow keys|arrows|keyboard)\b")
"""Words of hints that a finger cannot follow."""


SPAN = """() => {
  const canvas = document.querySelector(".lanes canvas"), scale = canvas.width / canvas.clientWidth, edge = Math.ceil(90 * scale);
  const { data, width, height } = canvas.getContext("2d").getImageData(edge, 0, canvas.width - edge, canvas.height);
  for (let at = Math.ceil(40 * scale) * width; at < width * height; at++) {
    const [red, green, blue] = data.subarray(4 * at, 4 * at + 3);
    if (Math.max(red, green, blue) - Math.min(red, green, blue) > 100) return [(edge + (at % width)) / scale, Math.floor(at / width) / scale];
  }
}"""  # noqa: E501
"""Where a picture of lanes has something coloured under its first head."""


@pytest.fixture(params=[320, 360, 768, 1360, 1920])
def wide(request: pytest.FixtureRequest, chromium: Any, town: Town) -> Iterator[Any]:
    yield from signed_in(chromium, town, viewport={"width": request.param, "height": 800})


@pytest.fixture(params=["light", "dark"])
def colored(request: pytest.FixtureRequest, chromium: Any, town: Town) -> Iterator[Any]:
    yield from signed_in(chromium, town, color_scheme=request.param)


def signed_in(chromium: Any, town: Town, **more: Any) -> Iterator[Any]:
    context = new_context(chromium, **more)
    page = context.new_page()
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    yield page
    context.close()


def each_view(page: Any, town: Town) -> Iterator[str]:
    """Opens one view after the other."""
    for view in views(town):
        show(page, town, view)
        yield view


def cut_or_covered(page: Any, town: Town) -> dict[str, Any]:
    return {
        view: problems for view in each_view(page, town) if (problems := page.evaluate(CUT) + page.evaluate(COVERED))
    }


def test_nothing_is_cut_or_covered_on_a_phone_and_on_a_screen(wide: Any, town: Town) -> None:
    """320 pixels are a window of 1280 at a zoom of 400%."""
    assert cut_or_covered(wide, town) == {}


def test_text_grows_with_the_size_that_the_browser_is_set_to(large_text: Any, town: Town) -> None:
    for page in signed_in(large_text, town, viewport={"width": 1280, "height": 800}):
        assert page.evaluate("getComputedStyle(document.documentElement).fontSize") == "30px"
        assert cut_or_covered(page, town) == {}


def test_hints_of_a_phone_suit_a_finger(chromium: Any, town: Town) -> None:
    phone = {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True}
    for page in signed_in(chromium, town, **phone):
        found = {
            view: lines
            for view in each_view(page, town)
            if (lines := [one for one in page.locator("main").inner_text().splitlines() if OF_A_MOUSE.search(one)])
        }
        assert found == {}
        show(page, town, f"run/{town.done.id}/timeline")
        page.locator(".touch >> text=Touch a span").scroll_into_view_if_needed()
        across, down = page.evaluate(SPAN)
        page.locator(".lanes canvas").tap(position={"x": across, "y": down})
        page.wait_for_selector("p.about >> text=worker scripted")
        show(page, town, f"run/{town.done.id}")
        assert page.locator(".charts .touch, .bar .touch").first.is_visible()
        page.locator(".chart .u-over").first.tap()
        page.wait_for_selector("h2 >> text=Groups of step")


def test_paper_is_light_and_has_whole_texts(page: Any, town: Town) -> None:
    page.emulate_media(color_scheme="dark")
    sign_in(page, town, "ada")
    group = town.done.groups()[0].group
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episode/{group}-0")
    page.wait_for_selector(".tokens")
    colors = "() => ['backgroundColor', 'color'].map((one) => getComputedStyle(document.documentElement)[one])"
    dark = page.evaluate(colors)
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(colors) == ["rgb(245, 246, 249)", "rgb(27, 35, 48)"] != dark
    assert page.locator("header.top").is_hidden() and page.locator(".actions").is_hidden()
    assert page.locator(".tokens").evaluate("one => one.scrollHeight <= one.clientHeight")
    assert page.locator(".token").first.evaluate("one => getComputedStyle(one).printColorAdjust") == "exact"


def test_paper_has_the_texts_of_buttons_that_are_read(page: Any, town: Town) -> None:
    """The heads of a table, the bars of a histogram, the names of tenants."""
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    page.emulate_media(media="print")
    read = {
        "runs": "th >> text=Reward",
        f"run/{town.done.id}/step/1": ".histogram button svg",
        "tenants": "td >> text=ada",
    }
    for view, found in read.items():
        page.goto(f"{town.service.url}/#/{view}")
        page.wait_for_selector(found, state="attached")
        assert page.locator(found).first.is_visible(), view
    assert page.locator("button >> text=Add tenant").is_hidden()


def test_reasoning_is_on_paper_and_folded_again_after_it(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    group = town.done.groups()[0].group

    def reasoned(route: Any) -> None:
        found = (answer := route.fetch()).json()
        found["members"][0]["replies"] = ["<think>so it is</think>4"]
        route.fulfill(response=answer, json=found)

    page.route(f"**/groups/{group}", reasoned)
    page.goto(f"{town.service.url}/#/run/{town.done.id}/group/{group}")
    page.wait_for_selector("details.think")
    page.evaluate(
        """() => matchMedia("print").addEventListener("change", ({ matches }) => {
            if (matches) window.printed = document.querySelector("details.think pre").checkVisibility();
        })"""
    )
    page.pdf()
    assert page.evaluate("printed") is True
    page.wait_for_selector("details.think pre", state="hidden")


PRINTED = """() => {
  const printed = [];
  matchMedia("print").addEventListener("change", ({ matches }) => {
    if (matches) for (const one of document.querySelectorAll("canvas")) printed.push([one.toDataURL(), one.getBoundingClientRect().right <= innerWidth]);
  });
  window.printed = printed;
}"""  # noqa: E501
"""Notes each picture when the browser lays the page out for paper, and whether it fits."""


WALK = """async () => {
  const kinds = [], canvas = document.querySelector(".lanes canvas");
  for (let at = 0; at < 500; at++) {
    canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
    await new Promise(requestAnimationFrame);
    kinds.push(document.querySelector("p.about").innerText.split(" · ")[0]);
  }
  return kinds;
}"""
"""The kinds of the spans to which the arrow key leads, one after the other."""


OFF_PAPER = """() => [...document.querySelectorAll("main *")].filter((one) => {
  const { left, right, width } = one.getBoundingClientRect();
  return left < -1 || right > innerWidth + 1 || (one.matches("canvas") && width < 200);
}).map((one) => one.outerHTML.slice(0, 120))"""
"""Elements that are wider than the paper, and pictures that are too small to be read."""


def test_everything_fits_on_paper(page: Any, town: Town) -> None:
    town.keys["admin"] = town.service.key
    page.set_viewport_size({"width": 718, "height": 1000})  # A4 with the margins of a browser
    sign_in(page, town, "admin")
    page.emulate_media(media="print")
    found = {view: off for view in each_view(page, town) if (off := page.evaluate(OFF_PAPER))}
    assert found == {}


@pytest.mark.parametrize("view", ["", "/timeline"])
def test_pictures_on_paper_have_the_colors_of_light(page: Any, town: Town, view: str) -> None:
    sign_in(page, town, "ada")
    drawn = "() => [...document.querySelectorAll('canvas')].map((one) => one.toDataURL())"
    pictures = {}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        show(page, town, f"run/{town.done.id}{view}")
        pictures[scheme] = page.evaluate(drawn)
    page.evaluate(PRINTED)
    page.pdf()
    assert [picture for picture, _ in page.evaluate("printed")] == pictures["light"] != pictures["dark"]
    page.wait_for_function(f"dark => JSON.stringify(({drawn})()) === JSON.stringify(dark)", arg=pictures["dark"])
    assert page.evaluate("document.documentElement.dataset.theme") is None


def test_colors_with_a_meaning_stay_where_the_system_forces_its_palette(page: Any, town: Town) -> None:
    page.emulate_media(forced_colors="active")
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.done.id}")
    page.wait_for_selector(".legend .swatch.s1")
    ground = "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    assert len(set(page.eval_on_selector_all(".legend .swatch.s0, .legend .swatch.s1", ground))) == 2
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episode/{town.done.groups()[0].group}-0")
    page.wait_for_selector(".token.lp1")
    token, box = (page.locator(one).first.evaluate("one => getComputedStyle(one).backgroundColor")
                  for one in (".token.lp1", ".tokens"))  # fmt: skip
    assert token != box


def test_spans_of_the_timeline_are_read_by_the_keyboard(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    show(page, town, f"run/{town.done.id}/timeline")
    page.focus(".lanes canvas")
    read = []
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        page.wait_for_function("() => !document.querySelector('p.about .muted')")
        read.append(page.locator("p.about").inner_text())
    assert read[0] == read[2] and "worker scripted" in read[0]
    assert {"prefill", "decode", "train", "commit"} <= set(page.evaluate(WALK)), "to the last lane"


def test_every_text_has_enough_contrast_in_light_and_dark(colored: Any, town: Town) -> None:
    found = {view: problems for view in each_view(colored, town) if (problems := colored.evaluate(CONTRAST))}
    sign_out(colored)
    assert found == {} and colored.evaluate(CONTRAST) == []


def test_tab_reaches_every_control_and_each_has_a_name(page: Any, town: Town) -> None:
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    missed: dict[str, Any] = {}
    for view in each_view(page, town):
        named = page.evaluate(NUMBERED)
        reached = set()
        for _ in range(2 * len(named) + 5):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("window.numbered.indexOf(document.activeElement)"))
            if reached >= set(range(len(named))):
                break
        nameless = [one for one, name in named if not name]
        if wrong := [*nameless, *(one for at, (one, _) in enumerate(named) if at not in reached)]:
            missed[view] = wrong
    assert missed == {}


@pytest.mark.parametrize("answered", ["", "/api/v1/jobs/[^/]*$"], ids=["nothing", "the run alone"])
def test_a_view_without_its_data_shows_that_it_loads(page: Any, town: Town, answered: str) -> None:
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    passes = re.compile(f"account$|{answered}" if answered else "account$")

    def hold(route: Any) -> None:
        if passes.search(route.request.url.partition("?")[0]):
            route.continue_()

    page.route(re.compile("/api/v1/|/openapi.json"), hold)
    silent = []
    for view in views(town):
        page.goto(f"{town.service.url}/#/{view}")
        page.reload()
        try:
            page.wait_for_selector("main >> text=Loading …")
        except Exception:
            silent.append(view)
    page.unroute_all(behavior="ignoreErrors")
    assert silent == []


def test_steps_are_chosen_and_read_by_the_keyboard(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    show(page, town, f"run/{town.done.id}")
    page.fill("label:has-text('to') input[type=number] >> nth=-1", "3")
    page.keyboard.press("Tab")
    page.wait_for_function("() => document.querySelector('.chart .legend b').textContent === '3'")
    page.click("button >> text=Show all steps")
    page.wait_for_function("() => document.querySelector('.chart .legend b').textContent === '6'")


def test_failed_episodes_are_one_link_from_the_run(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/run/{town.driven.id}")
    page.click(".facts a >> text=1 failed")
    page.wait_for_selector("h2 >> text=Why episodes failed")


def test_tokens_of_a_chat_are_read_by_the_keyboard(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    page.goto(f"{town.service.url}/#/chat")
    page.fill("textarea[aria-label='Message']", "2+2?")
    page.wait_for_selector("button.main:not(:disabled) >> text=Send")
    page.keyboard.press("Enter")
    page.wait_for_selector(".side .token")
    page.focus(".side .tokens")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".side .about >> text=log-probability -0.5000 nats")
    page.wait_for_selector(".side .token.at")  # marked in a later frame
    assert page.locator(".side .token.at").count() == 1


def test_a_template_s_mark_reads_from_left_to_right_in_a_line_of_arabic(page: Any, town: Town) -> None:
    """A worker's name at the beginning of such a line does not turn it around either."""
    sign_in(page, town, "ada")
    group = town.done.groups()[0].group

    def arabic(route: Any) -> None:
        found = (answer := route.fetch()).json()
        for one in found["trajectories"]:
            one["texts"] = ["\u0633\u0624\u0627\u0644", *["\u0644"] * (len(one["texts"]) - 2), "<|im_end|>"]
        route.fulfill(response=answer, json=found)

    page.route(f"**/episodes/{group}-0", arabic)
    page.goto(f"{town.service.url}/#/run/{town.done.id}/episode/{group}-0")
    page.wait_for_selector(".token.marker >> nth=-1")
    mark, first = page.locator(".token.marker").last.bounding_box(), page.locator(".token.lp1, .token.lp0").first
    assert mark["x"] < first.bounding_box()["x"]
    sides = page.locator(".token.marker").last.evaluate(
        """one => [0, 9].map((at) => {
            const range = document.createRange();
            range.setStart(one.firstChild, at);
            range.setEnd(one.firstChild, at + 1);
            return range.getBoundingClientRect().left;
        })"""
    )
    assert sides[0] < sides[1]
