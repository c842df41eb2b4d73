"""A browser and a service for the tests of the page, once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.pages import CHROMIUM, Town, new_context, opened


@pytest.fixture(scope="session")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with opened(tmp_path_factory.mktemp("town")) as made:
        yield made


ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="make test-page installs it")
    with sync_api.sync_playwright() as started:
        yield started


@pytest.fixture(scope="session")
def chromium(playwright: Any) -> Iterator[Any]:
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
    yield browser
    browser.close()


@pytest.fixture
def large_text(playwright: Any) -> Iterator[Any]:
    """A browser whose text is set to twice the usual size."""
    arguments = [*ARGUMENTS, "--blink-settings=defaultFontSize=32"]
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=arguments)
    yield browser
    browser.close()


@pytest.fixture
def page(chromium: Any, town: Town) -> Iterator[Any]:
    """A page that fails the test where a script fails, the policy blocks something, or a request leaves the service."""
    context = new_context(chromium, viewport={"width": 1360, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    page.on(
        "request", lambda one: None if one.url.startswith((town.service.url, "data:")) else problems.append(one.url)
    )
    yield page
    page.unroute_all(behavior="ignoreErrors")
    title = page.title()
    context.close()
    assert problems == [] and title.endswith("Rookery") and "taken" not in title
