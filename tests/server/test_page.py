"""The page's files, signing in by a cookie, and the list of runs, over real sockets."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import Response
from starlette.requests import HTTPConnection
from tests.support.faces import job, served

from rookery.client import Client
from rookery.errors import Unauthorized
from rookery.server.launcher import EmbeddedService
from rookery.server.routes.page import FILES, FOLDER
from rookery.server.signin import COOKIE_SECONDS, LINK_SECONDS, SignIns

PAGE = {"X-Rookery-Page": "1"}

VENDORED = {
    "vendor/preact.mjs": "225d7a773766e6fb2cfcc45274fe41d2059f5782f3f2c4569aa5132a2d3a2902",
    "vendor/hooks.mjs": "86c7aecddbc493912b55a803b8f7709042e5d6aaa27f1ad85bcbb5cf34d18084",
    "vendor/htm.mjs": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
    "vendor/uPlot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "vendor/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""preact 11.2.0 and its hooks, htm 3.1.1, uPlot 1.6.32, as npm has them, but for their references to source maps."""


class SetClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("page"), failed_keys_per_minute=20) as service:
        yield service


@pytest.fixture
def browser(service: EmbeddedService) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers=PAGE, timeout=60) as client:
        yield client


def sign_in(browser: httpx.Client, key: str) -> httpx.Response:
    return browser.post("/api/v1/sign-in", headers={"Authorization": f"Bearer {key}"}).raise_for_status()


# --- files ------------------------------------------------------------------------------------------------------------


def test_vendored_files_are_those_of_their_release() -> None:
    found = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items() if "vendor/" in name}
    assert found == VENDORED
    assert {path.name for path in (FOLDER / "vendor").glob("LICENSE.*")} == {
        "LICENSE.preact", "LICENSE.htm", "LICENSE.uPlot",
    }  # fmt: skip


def test_page_needs_no_key_and_allows_only_its_files(browser: httpx.Client) -> None:
    page = browser.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert re.fullmatch(r"'self' 'sha256-[A-Za-z0-9+/]{43}='", policy["script-src"])
    assert "unsafe" not in page.headers["content-security-policy"] and "http" not in policy["connect-src"]
    assert not re.search(r"https?://", page.text), "nothing outside this service"
    for name in re.findall(r'(?:src|href)="/page/([^"]+)"', page.text):
        assert name in FILES
    for name in FILES:
        response = browser.get(f"/page/{name}")
        assert response.status_code == 200 and response.content == FILES[name]
        if name.endswith((".js", ".mjs")):
            assert response.headers["content-type"] == "text/javascript; charset=utf-8"
        again = browser.get(f"/page/{name}", headers={"If-None-Match": response.headers["etag"]})
        assert again.status_code == 304 and again.content == b""


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/vendor"])
def test_no_file_outside_the_page_is_served(service: EmbeddedService, path: str) -> None:
    response = httpx.get(service.url + path, timeout=60)
    assert response.status_code == 404 and "import" not in response.text


def test_scripts_of_the_page_load_nothing_from_other_origins() -> None:
    for name, content in FILES.items():
        if "vendor/" not in name and name.endswith(".js"):
            text = content.decode()
            for wanted in re.findall(r'from "([^"]+)"', text):
                assert wanted in ("preact", "preact/hooks", "htm") or (
                    wanted.startswith("./") and wanted[2:] in FILES
                ), (name, wanted)
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|new Function|document\.write", text), (
                name
            )


# --- signing in -------------------------------------------------------------------------------------------------------


def test_cookie_cannot_be_read_by_scripts_or_sent_by_other_sites(
    service: EmbeddedService, browser: httpx.Client
) -> None:
    cookie = sign_in(browser, service.key).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and f"Max-Age={COOKIE_SECONDS}" in cookie
    assert service.key not in cookie
    assert browser.get("/api/v1/account").json()["role"] == "admin"


@pytest.mark.parametrize(
    ("headers", "method", "status"),
    [
        ({}, "GET", 200),
        ({"Sec-Fetch-Site": "same-origin"}, "GET", 200),
        ({"Sec-Fetch-Site": "none"}, "GET", 200),
        ({"Sec-Fetch-Site": "cross-site"}, "GET", 401),
        ({"Sec-Fetch-Site": "same-site"}, "GET", 401),
        (PAGE, "POST", 204),
        ({}, "POST", 401),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "POST", 401),
        ({"Content-Type": "text/plain"}, "POST", 401),
        ({**PAGE, "Sec-Fetch-Site": "same-site"}, "POST", 401),
        ({"Origin": "http://127.0.0.1:1"}, "POST", 401),
    ],
)
def test_request_that_another_page_may_have_sent_has_no_rights(
    service: EmbeddedService, browser: httpx.Client, headers: dict[str, str], method: str, status: int
) -> None:
    sign_in(browser, service.key)
    with httpx.Client(base_url=service.url, cookies=browser.cookies, timeout=60) as other:
        path = "/api/v1/sign-out" if method == "POST" else "/api/v1/account"
        assert other.request(method, path, headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/api/v1/sign-in", "/api/v1/sign-in/links"])
def test_cookie_gives_no_other_cookie_and_no_link(service: EmbeddedService, browser: httpx.Client, path: str) -> None:
    sign_in(browser, service.key)
    for headers in ({}, {"Authorization": "Bearer"}, {"X-API-Key": ""}):
        refused = browser.post(path, headers=headers)
        assert refused.status_code == 401 and "set-cookie" not in refused.headers and "key itself" in refused.text
    assert browser.post(path, headers={"X-API-Key": service.key}).is_success
    assert browser.get("/api/v1/account").status_code == 200


def test_link_ends_with_the_process_that_gave_it() -> None:
    clock = SetClock()
    first, restarted = SignIns(clock, b"one"), SignIns(clock, b"one")
    link = first.link("a" * 64)
    assert first.redeem(link) == "a" * 64
    with pytest.raises(Unauthorized, match="rookery open"):
        restarted.redeem(link)


def test_cookie_ends_with_its_key_and_with_signing_out(service: EmbeddedService, browser: httpx.Client) -> None:
    with Client(service.url, service.key) as admin:
        made = admin.add_key("admin", "browser")
        sign_in(browser, made.key)
        assert browser.get("/api/v1/account").status_code == 200
        admin.revoke_key("admin", next(key.id for key in admin.keys("admin") if key.label == "browser"))
        assert browser.get("/api/v1/account").status_code == 401
    sign_in(browser, service.key)
    assert browser.post("/api/v1/sign-out").status_code == 204
    assert browser.get("/api/v1/account").status_code == 401


def test_changed_cookie_opens_nothing(service: EmbeddedService, browser: httpx.Client) -> None:
    sign_in(browser, service.key)
    ((name, value),) = browser.cookies.items()
    key, end, salt, code = value.split(".")
    for forged in (
        "", ".", "...", "x" * 5000, f"{key}.{int(end) + 1}.{salt}.{code}", f"{'0' * 64}.{end}.{salt}.{code}",
        f"{key}.{end}.{salt}.{'0' * 64}", f"{key}.{end}.{salt}.{code[:-1]}", f"{key}.{end}.{salt}.{code}x", "é.é.é.é",
    ):  # fmt: skip
        headers = {"Cookie": f"{name}={forged}".encode()}
        assert httpx.get(f"{service.url}/api/v1/account", headers=headers, timeout=60).status_code == 401, forged


def test_wrong_keys_are_counted_and_limited(tmp_path: Path) -> None:
    with (
        served(tmp_path, failed_keys_per_minute=3) as service,
        httpx.Client(base_url=service.url, headers=PAGE, timeout=60) as one,
    ):
        for _ in range(3):
            assert one.post("/api/v1/sign-in", headers={"Authorization": "Bearer tml-wrong"}).status_code == 401
        assert one.post("/api/v1/sign-in", headers={"Authorization": "Bearer tml-wrong"}).status_code == 429
        assert one.post("/api/v1/sign-in/links/guess").status_code == 429
        sign_in(one, service.key)  # the administrator's own key is known from the start


def test_link_signs_in_once_and_only_from_the_page(service: EmbeddedService, browser: httpx.Client) -> None:
    with Client(service.url, service.key) as client:
        link = client.sign_in_link()
    assert link.startswith(f"{service.url}/#/link/")
    path = f"/api/v1/sign-in/links/{link.rpartition('/')[2]}"
    assert httpx.post(service.url + path, timeout=60).status_code == 403
    assert browser.post(path).status_code == 204 and browser.get("/api/v1/account").status_code == 200
    again = browser.post(path)
    assert again.status_code == 401 and "rookery open" in again.json()["error"]


def test_cookies_and_links_expire_and_are_not_interchangeable() -> None:
    clock = SetClock()
    signins, others = SignIns(clock, b"one"), SignIns(clock, b"two")
    assert signins.cookie != others.cookie
    response = Response()
    signins.set_cookie(response, "a" * 64, secure=True)
    cookie = response.headers["set-cookie"].partition(";")[0].encode()
    request = HTTPConnection({"type": "http", "method": "GET", "headers": [(b"cookie", cookie)]})
    assert signins.key_of(request) == ("a" * 64, clock.now + COOKIE_SECONDS), "what it opens ends then"
    link = signins.link("a" * 64)
    with pytest.raises(Exception, match="older than a minute"):
        others.redeem(link)
    clock.now += LINK_SECONDS
    with pytest.raises(Exception, match="older than a minute"):
        signins.redeem(link)


def test_cookie_survives_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as service, httpx.Client(base_url=service.url, headers=PAGE, timeout=60) as browser:
        sign_in(browser, service.key)
        cookies = browser.cookies
    with served(tmp_path) as service, httpx.Client(base_url=service.url, cookies=cookies, timeout=60) as browser:
        assert browser.get("/api/v1/account").json()["name"] == "admin"


# --- the list of runs -------------------------------------------------------------------------------------------------


def test_runs_are_chosen_sorted_and_paged_by_the_service(service: EmbeddedService, browser: httpx.Client) -> None:
    sign_in(browser, service.key)
    with Client(service.url, service.key) as client:
        made = [client.submit(job(name=f"run-{name}", environment={"hosted": "none"})) for name in "cab"]
        made[0].cancel()
        names = lambda **given: [run["name"] for run in browser.get("/api/v1/runs", params=given).json()["runs"]]  # noqa: E731
        assert names(text="run-") == ["run-b", "run-a", "run-c"], "newest first"
        assert names(text="RUN-", order="name", descending=False) == ["run-a", "run-b", "run-c"]
        assert names(state=["cancelled"]) == ["run-c"]
        assert names(text="%") == [] and names(text="run_") == [], "no pattern"
        page = browser.get("/api/v1/runs", params={"limit": 2, "offset": 2, "text": "run-"}).json()
        assert [run["name"] for run in page["runs"]] == ["run-c"] and page["total"] == 3
        assert "spec" not in page["runs"][0] and page["runs"][0]["since"] >= page["runs"][0]["created"]
        for order in ("created", "state", "step", "reward", "tenant"):
            assert len(names(order=order, text="run-")) == 3
    assert browser.get("/api/v1/runs", params={"order": "spec"}).status_code == 422
