"""``rookery top``: the live table by its keys, and the same as text, against a real service."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.faces import Reach, ThreadedWorker, job, served
from tests.support.waiting import LOOK_SECONDS, PATIENCE_SECONDS
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from rookery.cli import main
from rookery.cli.overview import ServiceReader
from rookery.cli.top_screen import RunScreen, TopScreen, step_table
from rookery.client import Client
from rookery.server.launcher import EmbeddedService

NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with (
        served(tmp_path_factory.mktemp("top")) as running,
        ThreadedWorker.of(running),
        Client(running.url, running.key) as client,
    ):
        for steps, name in enumerate(NAMES, 2):
            client.submit(job(name=name, stop={"steps": steps})).wait()
        yield running


async def shown(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Wait until the screen shows something."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await pilot.pause(LOOK_SECONDS)


def first_cells(app: TopScreen, table: str) -> list[str]:
    found: DataTable[Any] = app.screen.query_one(table, DataTable)
    return [str(found.get_row_at(row)[0]) for row in range(found.row_count)]


def text_of(app: TopScreen, id: str) -> str:
    return str(app.screen.query_one(id, Static).content)


async def test_runs_are_sorted_searched_and_opened_by_keys(service: EmbeddedService) -> None:
    with Client(service.url, service.key) as client:
        app = TopScreen(ServiceReader(client))
        async with app.run_test(size=(160, 40)) as pilot:
            await shown(pilot, lambda: first_cells(app, "#runs") == ["gamma", "beta", "alpha"])
            await shown(pilot, lambda: first_cells(app, "#workers") == ["scripted"])
            assert "3 completed" in text_of(app, "#line") and "1 of 1 worker serve" in text_of(app, "#line")
            await pilot.press("s")
            await shown(pilot, lambda: first_cells(app, "#runs") == ["alpha", "beta", "gamma"])
            await pilot.press("S")
            await shown(pilot, lambda: first_cells(app, "#runs") == ["gamma", "beta", "alpha"])
            await pilot.press("slash", "b", "e", "t", "enter")
            await shown(pilot, lambda: first_cells(app, "#runs") == ["beta"])
            await pilot.press("slash", "backspace", "backspace", "backspace", "enter", "f")
            await shown(pilot, lambda: first_cells(app, "#runs") == [] and "running only" in text_of(app, "#line"))
            await pilot.press("f")
            await shown(pilot, lambda: len(first_cells(app, "#runs")) == 3)
            await pilot.press("down", "enter")
            await shown(pilot, lambda: isinstance(app.screen, RunScreen) and "events" in text_of(app, "#run"))
            run = text_of(app, "#run")
            assert "beta" in run and "completed" in run and "step 3/3" in run and "base model" in run
            await pilot.press("escape")
            await shown(pilot, lambda: not isinstance(app.screen, RunScreen))
            assert app.screen.query_one("#runs", DataTable).cursor_row == 1
            await pilot.press("q")
        assert app.return_code == 0


async def test_tenant_sees_only_its_runs_and_no_fleet(service: EmbeddedService) -> None:
    with Client(service.url, service.key) as admin:
        admin.add_tenant("ada")
        key = str(admin.add_key("ada").key)
    with Client(service.url, key) as client:
        app = TopScreen(ServiceReader(client))
        async with app.run_test(size=(100, 30)) as pilot:
            await shown(pilot, lambda: "by created" in text_of(app, "#line"))
            assert first_cells(app, "#runs") == [] and not app.screen.query_one("#workers").display


async def test_service_that_does_not_answer_is_reported_and_the_table_stays(service: EmbeddedService) -> None:
    with Client(service.url, service.key) as client:
        source = ServiceReader(client)
        app = TopScreen(source)
        async with app.run_test(size=(160, 40)) as pilot:
            await shown(pilot, lambda: len(first_cells(app, "#runs")) == 3)
            source.client = Client("http://127.0.0.1:9", service.key)
            await pilot.press("r")
            await shown(pilot, lambda: bool(app.screen.query_one("#problem").display))
            assert "what follows is older" in text_of(app, "#problem") and len(first_cells(app, "#runs")) == 3
            source.client = client
            await pilot.press("r")
            await shown(pilot, lambda: not app.screen.query_one("#problem").display)


def test_text_and_json_are_printed_once(
    service: EmbeddedService, reach: Reach, capsys: pytest.CaptureFixture[str]
) -> None:
    reach(service)
    for arguments in (["top"], ["top", "--once"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        printed = capsys.readouterr().out
        assert end.value.code == 0 and all(name in printed for name in (*NAMES, "scripted"))
        assert printed.startswith("3 completed · ") and "\x1b" not in printed
    with pytest.raises(SystemExit):
        main(["top", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {run["name"] for run in found["runs"]} == set(NAMES) and found["workers"][0]["name"] == "scripted"


def test_no_other_command_imports_textual() -> None:
    script = "import sys, rookery.cli; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_steps_of_a_run_on_rows_have_a_loss() -> None:
    row = {"step": 3, "loss": 0.25, "rows": 4.0, "length_mean": 9.0, "seconds/train": 1.0, "reward": None}
    assert "loss" in step_table([row]).plain and "0.250" in step_table([row]).plain
    assert "reward" in step_table([row | {"reward": 0.5}]).plain
    assert step_table([]).plain == ""
