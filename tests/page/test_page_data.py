"""The page and the service's answers: its figures are theirs, a part that cannot be read says why, and an open page
continues after a restart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.support.faces import MODEL, ThreadedWorker, job, served
from tests.support.pages import CHROMIUM, Town, new_context, of_run, others_of, settle, show, sign_in
from tests.support.ports import free_port
from tests.support.waiting import until

import rookery
from rookery.client import Client, Job

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not CHROMIUM.exists(), reason="apt-get install chromium"),
]

BROKEN = "this part is broken"


# --- figures ----------------------------------------------------------------------------------------------------------

CELLS = """(label) => {
  const [head, ...rows] = document.querySelector(`[aria-label="${label}"] table`).rows;
  const names = [...head.cells].map((one) => one.innerText.replace(/[↑↓]/, "").trim());
  return rows.map((row) => Object.fromEntries([...row.cells].map((one, at) => [names[at], one.innerText.trim()])));
}"""
"""The rows of a table by the names of its columns."""


def table(page: Any, label: str) -> list[dict[str, str]]:
    page.wait_for_selector(f'[aria-label="{label}"] tbody tr')
    return list(page.evaluate(CELLS, label))


def agrees(text: str, value: float | None) -> bool:
    """Whether a text of the page shows a number of the API, as far as its digits go."""
    if value is None:
        return text == "–"
    found = re.search(r"-?[\d,]*\.?\d+", text)
    assert found, text
    digits = len(found[0].partition(".")[2])
    return abs(float(found[0].replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-9


def differing(rows: list[dict[str, str]], expected: list[dict[str, Any]]) -> list[Any]:
    """The cells in which a table of the page is not what it should be; a text is compared as it is."""
    assert len(rows) == len(expected)
    return [
        (name, row[name], value)
        for row, wanted in zip(rows, expected, strict=True)
        for name, value in wanted.items()
        if not (row[name] == value if isinstance(value, str) else agrees(row[name], value))
    ]


def test_figures_of_a_run_are_those_of_the_api(page: Any, town: Town) -> None:
    sign_in(page, town, "ada")
    done, rows = town.done.show(), list(town.done.metrics(follow=False))
    show(page, town, f"run/{town.done.id}")
    shown = table(page, "Newest steps")
    newest = [
        {"Step": row.step, "Version": row.version, "Reward": row.reward, "Spread": row.reward_std,
         "Episodes": row.episodes, "No variance": 100 * row.zero_variance_share, "Length, tokens": row.length_mean,
         "Staleness": row.staleness_mean}
        for row in reversed(rows)
    ]  # fmt: skip
    assert differing(shown, newest) == []
    facts = dict(page.eval_on_selector_all(".facts div", "all => all.map((one) => one.innerText.split('\\n'))"))
    assert facts["step"] == f"{done.step} of {done.steps}" and agrees(facts["reward"], done.reward)
    assert agrees(facts["tokens sampled"], done.tokens) and agrees(facts["episodes"], done.counters["episodes"])
    evaluations = [
        {"Version": one.version, "Mean reward": one.mean, "Standard error": one.stderr,
         "Held-out prompts": one.prompts, "Best constant reply": one.constant and one.constant.reward}
        for one in reversed(town.done.evaluations())
    ]  # fmt: skip
    assert len(evaluations) > 2 and differing(table(page, "Evaluations"), evaluations) == []
    show(page, town, f"run/{town.done.id}/step/2")
    groups = town.done.groups(2)
    means = [sum(one.reward for one in group.members) / len(group.members) for group in groups]
    wanted = [
        {"Group": group.ordinal, "Mean": mean, "Oldest version": group.min_version}
        for group, mean in zip(groups, means, strict=True)
    ]
    assert differing(table(page, "Groups"), wanted) == []


def test_lists_have_the_figures_of_the_api(page: Any, town: Town) -> None:
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    with Client(town.service.url, town.service.key) as admin:
        runs = admin.runs(limit=50).runs
        settle(page)
        shown = [{"Run": f"{one.name}\n{one.base_model}", "Reward": one.reward, "Staleness": one.staleness,
                  "Tenant": one.tenant, "State": one.state} for one in runs]  # fmt: skip
        assert differing(table(page, "Runs"), shown) == []
        show(page, town, "usage")
        used = [{"Steps": one.step, "Tokens sampled": one.tokens, "Cost": one.cost.cost, "State": one.state,
                 "Preemptible part": one.cost.preemptible} for one in runs]  # fmt: skip
        assert differing(table(page, "Usage of runs"), used) == []
        show(page, town, "tenants")
        limits = [{"jobs": one.limits.jobs, "adapters": one.limits.adapters, "weight": one.limits.weight,
                   "Tokens today": one.tokens_today} for one in admin.tenants()]  # fmt: skip
        assert differing(table(page, "Tenants"), limits) == []


def test_joins_and_losses_of_workers_are_not_pushed_out_by_their_work(page: Any, town: Town) -> None:
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    show(page, town, "fleet")
    shown = table(page, "Events of workers")
    assert "ready" in {row["Event"] for row in shown} and "trained" not in {row["Event"] for row in shown}
    page.check("label >> text=with adapters and training")
    page.wait_for_selector("[aria-label='Events of workers'] td >> text=trained")


DRAW_AGAIN = """() => {
  const smoothing = document.querySelector("input[type=range]");
  smoothing.value = 0.5;
  smoothing.dispatchEvent(new Event("input", { bubbles: true }));
}"""
"""Changes the view without the keyboard, as a new step of a running job does."""


def test_steps_of_the_shown_range_are_listed(page: Any, town: Town) -> None:
    """So every step is reached without a mouse, also where the view is drawn again while a number is typed."""
    sign_in(page, town, "ada")
    show(page, town, f"run/{town.done.id}")
    page.fill("label:has-text('to') input[type=number] >> nth=-1", "3")
    page.evaluate(DRAW_AGAIN)
    page.wait_for_selector("text=weight of the past 0.50")
    page.keyboard.press("Tab")
    page.wait_for_selector("h2 >> text=Last steps shown")
    assert [row["Step"] for row in table(page, "Newest steps")] == ["3", "2", "1"]


class Fallen(rookery.Environment):
    """An environment in which every episode fails."""

    def prompts(self, split: str) -> Iterator[Any]:
        return iter([{"number": number} for number in range(40)])

    async def reset(self, prompt: Any, seed: int) -> Any:
        raise RuntimeError("the tool is away")

    async def step(self, reply: Any) -> Any:
        raise NotImplementedError


def test_alarms_of_a_run_that_took_no_step_are_shown(page: Any, town: Town) -> None:
    with Client(town.service.url, town.keys["ada"]) as client:
        run = client.train(
            base_model=MODEL, environment=Fallen, stop={"steps": 2}, policies={"main": {"rank": 4, "targets": ["q"]}},
            algorithm={"group_size": 4, "groups_per_step": 2},
        )  # fmt: skip
        until(lambda: run.show().state == "paused")
        assert [one.name for one in run.health().alarms] == ["failing episodes"]
        sign_in(page, town, "ada")
        page.goto(f"{town.service.url}/#/run/{run.id}")
        page.wait_for_selector("text=No step is committed yet.")
        page.wait_for_selector("section[aria-label=Health] >> text=the tool is away")
        run.cancel()
        run.delete()


def test_log_is_read_beyond_its_newest_thousand_lines(page: Any, town: Town) -> None:
    def long(route: Any) -> None:
        asked = dict(part.split("=") for part in urlsplit(route.request.url).query.split("&"))
        end = int(asked.get("after", 2500))
        first = max(0, end - int(asked["limit"]))
        lines = [{"time": 1.0 + number, "kind": "note", "text": f"line {number}"} for number in range(first, end)]
        headers = {"X-Next-Page": str(first)} if first else {}
        route.fulfill(json=lines, headers=headers)

    sign_in(page, town, "ada")
    page.route(f"**/api/v1/jobs/{town.done.id}/events?*", long)
    page.goto(f"{town.service.url}/#/run/{town.done.id}/events")
    for length in (100, 1100, 2100, 2500):
        page.wait_for_selector(f"tbody tr >> nth={length - 1}")
        rows = page.locator("tbody tr")
        assert rows.count() == length and rows.last.inner_text().endswith(f"line {2500 - length}")
        if length < 2500:
            page.click("button >> text=Older events")
    assert page.locator("button >> text=Older events").count() == 0


def test_every_kept_version_can_be_chosen_in_the_chat(page: Any, town: Town) -> None:
    def many(route: Any) -> None:
        first = int(dict(part.split("=") for part in urlsplit(route.request.url).query.split("&")).get("after", 0))
        version = {"parent": None, "hash": "", "created": 1.0, "metrics": {}, "kept": True, "lost": ""}
        found = [{**version, "version": number, "step": number} for number in range(first, min(first + 1000, 1500))]
        route.fulfill(json=found, headers={"X-Next-Page": "1000"} if first == 0 else {})

    sign_in(page, town, "ada")
    page.route("**/versions?*", many)
    page.goto(f"{town.service.url}/#/chat?target={town.done.id}")
    page.wait_for_selector("select[aria-label='Model on the right: version'] option[value='1499']", state="attached")
    page.unroute_all(behavior="wait")


# --- parts that cannot be read ----------------------------------------------------------------------------------------


def kind(path: str) -> str:
    """A path of the API or a view without the names of single things."""
    return re.sub(r"(job|group|ep)-?[\w-]*[0-9a-f]{6}[\w-]*", "*", path)


def test_part_that_cannot_be_read_is_named_with_its_error(page: Any, town: Town) -> None:
    """In each view, each of the endpoints that it reads fails in turn."""
    town.keys["admin"] = town.service.key
    sign_in(page, town, "admin")
    asked: set[str] = set()
    page.on("request", lambda one: asked.add(urlsplit(one.url).path) if one.method == "GET" else None)
    seen: set[tuple[str, str]] = set()
    silent = []
    for view in [*others_of(town), *of_run(town.done), f"chat?target={town.done.id}"]:
        show(page, town, view)
        asked.clear()
        page.reload()
        settle(page)
        read = {path for path in asked if re.match(r"/api/v1/|/openapi", path) and not path.endswith("/account")}
        asked.clear()
        for path in sorted(read):
            if path.endswith("/metrics/stream") or (kind(view), kind(path)) in seen:
                continue
            seen.add((kind(view), kind(path)))
            address = re.compile(re.escape(path) + r"(\?.*)?$")
            page.route(address, lambda route: route.fulfill(status=500, json={"error": BROKEN}))
            page.reload()
            try:
                page.wait_for_selector(f"main >> text={BROKEN}")
            except Exception:
                silent.append((view, path))
            page.unroute(address)
    assert len(seen) > 25 and silent == []


# --- restarts ---------------------------------------------------------------------------------------------------------


@contextmanager
def working(root: Path, **more: Any) -> Iterator[Client]:
    """A service in this folder with a worker, and a client of it."""
    with served(root, **more) as service, ThreadedWorker.of(service), Client(service.url, service.key) as client:
        yield client


def test_open_pages_continue_after_a_restart_of_the_service(chromium: Any, tmp_path: Path) -> None:
    context, port = new_context(chromium), free_port()
    with working(tmp_path, port=port) as client:
        url = client.url
        done: Job = client.submit(job(name="ended"))
        assert done.wait().state == "completed"
        running = client.submit(job(name="running", stop={"steps": 100_000}))
        group = done.groups()[0].group
        page = context.new_page()
        page.goto(client.sign_in_link())
        page.wait_for_selector("header.top")
        views = ["runs", "fleet", "usage", "tenants", "timeline", f"run/{running.id}", f"run/{running.id}/steps",
                 f"run/{done.id}", f"run/{done.id}/group/{group}"]  # fmt: skip
        pages = {view: context.new_page() for view in views}
        for view, one in pages.items():
            one.goto(f"{url}/#/{view}")
            settle(one)
        pages[f"run/{running.id}"].wait_for_selector("text=● live")
        last = running.show().step
    for view, one in pages.items():
        if done.id not in view:  # a run that has ended is asked for seldom
            one.wait_for_selector("main >> text=the service does not answer")
    with working(tmp_path, port=port) as client:
        for view, one in pages.items():
            one.wait_for_selector("main >> text=the service does not answer", state="detached")
            assert one.locator("#key").count() == 0, f"{view}: still signed in"
        watched = pages[f"run/{running.id}"]
        watched.wait_for_selector("text=● live")
        watched.wait_for_function(f"() => Number(document.querySelector('.chart .legend b').textContent) > {last}")
        assert watched.locator("main .notice[role=status] >> text=no connection").count() == 0
        client.job(running.id).cancel()
    context.close()
