"""Every figure that a command shows as text is in its JSON.

Both forms of a command are made from the same answers of a real service, so figures that change with time are equal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support import waiting
from tests.support.commands import commands, options_of
from tests.support.faces import MODEL, ThreadedWorker, job, served

from rookery.cli import main
from rookery.client import Client
from rookery.server.launcher import EmbeddedService

EXAMPLES = Path(__file__).parents[2] / "examples"

SCALES = (1, 100, 1 / 60, 1 / 3600, 1 / 86400, 1 / 1000, 2.0**-10, 2.0**-20, 2.0**-30)
"""From the units of JSON to those of a text: percent, minutes, hours, days, thousands, and powers of 1024."""

NUMBER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?")
MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")

COMMANDS: dict[str, list[str]] = {
    "jobs list": [], "jobs show": ["sums"], "jobs logs": ["sums"], "jobs episodes": ["sums"],
    "jobs export": ["sums", "out.html"], "jobs tensorboard": ["sums", "board"], "adapters download": ["sums", "out"],
    "uploads list": [], "secrets list": [], "models": [], "chat": [MODEL, "-m", "2+2?", "--seed", "2"], "workers": [],
    "tenants list": [], "tenants limit": ["admin"], "tenants keys": ["admin"], "costs": [], "top": ["--once"],
    "trace": ["trace.json"], "run": ["job.yaml"],
    "plan": ["--workers", str(EXAMPLES / "fleet.yaml"), "--jobs", str(EXAMPLES / "sums.yaml"), "--budget", "50"],
    "simulate": ["--hours", "0.01", "--modes", "co-located,rookery", "--steps", "1"],
}  # fmt: skip
"""A call of each command that shows figures."""

WITHOUT_FIGURES = {
    "open", "jobs pause", "jobs resume", "jobs rollback", "jobs cancel", "jobs delete", "uploads delete", "secrets set",
    "secrets delete", "tenants add", "tenants rename", "tenants delete", "tenants key", "tenants revoke",
    "adapters push", "adapters export", "profile", "doctor",
}  # fmt: skip
"""They name what they changed or wrote; a profile is the same document in YAML, and doctor's lines are the texts of its
document."""


def leaves(value: Any) -> Iterator[Any]:
    """The values of a document, the keys of its objects, and how many things its lists and objects have."""
    if isinstance(value, dict | list):
        yield len(value)
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(inner)
    if not isinstance(value, dict | list):
        yield value


def missing(text: str, documents: list[Any]) -> list[str]:
    """The figures of a text that none of the documents has."""
    found = [leaf for document in documents for leaf in leaves(document)]
    numbers = [float(leaf) for leaf in found if isinstance(leaf, int | float)]
    for moment in set(MOMENT.findall(text)):
        if any(int(number) == datetime.fromisoformat(moment).timestamp() for number in numbers):
            text = text.replace(moment, " ")
    words = " ".join(text.split())
    for part in sorted({" ".join(leaf.split()) for leaf in found if isinstance(leaf, str)}, key=len, reverse=True):
        if part:  # whole words alone: a row's answer may be a digit
            words = re.sub(rf"(?<![\w.]){re.escape(part)}(?![\w]|\.\d)", " ", words)
    wrong = []
    for shown in NUMBER.findall(words):
        decimals = shown.partition(".")[2]
        exponent = int(shown.partition("e")[2] or 0)
        digits = len(decimals.partition("e")[0])
        slack = 0.501 * 10.0 ** (exponent - digits)
        figure = float(shown.replace(",", ""))
        if not any(abs(number * scale - figure) <= slack for number in numbers for scale in SCALES):
            wrong.append(shown)
    return wrong


def test_a_figure_that_a_document_lacks_is_found() -> None:
    document = {"bytes": 12345, "seconds": 90.0, "made": datetime(2026, 1, 2, 3, 4, 5).timestamp(), "id": "job-77"}
    text = "job-77: 12,345 bytes in 1.5 min at 2026-01-02 03:04:05"
    assert missing(text, [document]) == []
    assert missing(text, [{**document, "bytes": 0}]) == ["12,345"]
    assert missing(f"{text}, 37 of 52 pools", [document]) == ["37", "52"]
    assert missing(text, [{**document, "made": 0}]) != []


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("figures")) as running, ThreadedWorker.of(running):
        with Client(running.url, running.key) as client:
            waiting.until(lambda: any(worker["state"] == "serving" for worker in client.workers()))
            assert client.submit(job(name="sums", evaluation={"prompts": 2})).wait().state == "completed"
            client.set_secret("board", "x")
        yield running


def answered_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Within the test, a request to this service that was sent before gets the same answer again."""
    known: dict[tuple[str, str, bytes], tuple[int, httpx.Headers, bytes]] = {}
    send = httpx.Client.send

    def sent(self: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        if not str(request.url).startswith(url):
            return send(self, request, **more)
        key = request.method, str(request.url), request.read()
        if key not in known:
            answer = send(self, request, **more)
            content = answer.read()
            answer.close()
            kept = {name: value for name, value in answer.headers.items() if name != "content-encoding"}
            known[key] = answer.status_code, httpx.Headers(kept), content
        status, headers, content = known[key]
        return httpx.Response(status, headers=headers, content=content, request=request)

    monkeypatch.setattr(httpx.Client, "send", sent)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_figure_of_a_text_is_in_its_document(
    service: EmbeddedService,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    settings = service.settings
    for variable, value in (("URL", service.url), ("DATA", settings.data), ("CACHE", settings.cache)):
        monkeypatch.setenv(f"ROOKERY_{variable}", str(value))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(name="again", evaluation={"prompts": 2})))
    answered_once(monkeypatch, service.url)
    shown = []
    for form in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main([*name.split(), *COMMANDS[name], *form])
        shown.append(capsys.readouterr().out)
    text, document = shown
    assert text and missing(text, [json.loads(line) for line in document.splitlines()]) == []


def test_every_command_with_json_is_among_them() -> None:
    with_json = {name for name, command in commands().items() if "--json" in options_of(command)}
    assert with_json == COMMANDS.keys() | WITHOUT_FIGURES
