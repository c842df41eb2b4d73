"""The pictures of the page in this folder, taken from runs of a service.

    rookery serve                                    # in another terminal
    python examples/agent_phone_book.py              # the run of most pictures
    python docs/pictures.py RUN [RUN_WITH_POLICIES]  # names or ids; ROOKERY_URL and ROOKERY_KEY as for the client

The picture of a run with several policies is taken where one is given. Needs Debian's chromium, as ``make test-page``
does.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from rookery.client import Client, Job

FOLDER = Path(__file__).parent
WIDTH, PHONE = 1360, 390
TALLEST, RUN = 1600, 930
"""Pixels of a picture, and of that of a run: further down are more of the same."""
COLORS = 256


def take(page: Any, name: str, height: int = TALLEST) -> None:
    """Write what is shown as a picture with few colors, which is a fraction of the size."""
    page.wait_for_function("() => !document.querySelector('main').textContent.includes('Loading …')")
    page.wait_for_timeout(1500)
    page.mouse.move(2, 2)
    shown = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    shown = shown.crop((0, 0, shown.width, min(shown.height, height)))
    shown.quantize(COLORS, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)
    print(f"docs/{name}.png: {shown.width} x {shown.height}, {(FOLDER / f'{name}.png').stat().st_size:,} bytes")


def chosen(job: Job) -> tuple[str, str]:
    """The newest group whose rewards differ, and its episode with the lowest reward above 0."""
    group = next(one for one in job.groups() if one.state == "consumed" and not one.zero_variance)
    rewarded = [one for one in group.members if one.reward] or list(group.members)
    return group.group, min(rewarded, key=lambda one: one.reward or 0.0).episode


def main(run: str, several: str = "") -> None:
    with Client() as client, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])

        def opened(width: int, scheme: str, **device: Any) -> Any:
            context = browser.new_context(viewport={"width": width, "height": 700}, color_scheme=scheme, **device)
            page = context.new_page()
            page.goto(client.sign_in_link())
            page.wait_for_selector("header.top")
            return page

        job = client.job(run)
        group, episode = chosen(job)
        page = opened(WIDTH, "light")
        views = {
            "page-run": ("", RUN),
            "page-group": (f"/group/{group}", TALLEST),
            "page-timeline": ("/timeline", TALLEST),
        }
        for name, (view, height) in views.items():
            page.goto(f"{client.url}/#/run/{job.id}{view}")
            take(page, name, height)
        if several:
            page.goto(f"{client.url}/#/run/{client.job(several).id}")
            take(page, "page-policies", 1000)
        dark = opened(WIDTH, "dark")
        dark.goto(f"{client.url}/#/run/{job.id}/episode/{episode}")
        take(dark, "page-episode-dark")
        phone = opened(PHONE, "light", is_mobile=True, has_touch=True)
        phone.goto(f"{client.url}/#/run/{job.id}")
        take(phone, "page-run-phone", 800)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
