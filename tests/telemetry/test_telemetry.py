"""Prometheus, sinks, logs and tables show the values that they are given."""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from tests.support.waiting import until

from rookery.errors import UserError
from rookery.settings import Settings
from rookery.telemetry import log
from rookery.telemetry.metrics import ServiceMetrics, Sinks, check_sinks
from rookery.telemetry.table import job_table, sparkline, worker_table

# --- Prometheus, sinks, logs, the table -------------------------------------------------------------------------------


def test_scrapes_of_two_services_do_not_mix() -> None:
    figures = ServiceMetrics(
        jobs={"running": 2}, workers={"serving": 1}, totals={"steps": 7}, gauges={"requests_waiting": 3}
    )
    text = figures.render().decode()
    assert 'rookery_jobs{state="running"} 2.0' in text and 'rookery_workers{state="serving"} 1.0' in text
    assert "rookery_steps_total 7.0" in text and "rookery_requests_waiting 3.0" in text
    empty = ServiceMetrics(totals={"steps": 0}).render().decode()
    assert "rookery_steps_total 0.0" in empty and "running" not in empty


def test_sink_without_its_package_is_refused_with_the_install_command() -> None:
    for extra, wanted in (("tensorboard", {"tensorboard": True}), ("wandb", {"wandb_project": "mine"})):
        if importlib.util.find_spec(extra) is None:
            with pytest.raises(UserError, match=rf"pip install 'rookery\[{extra}\]'"):
                check_sinks(Settings.model_validate(wanted))
    check_sinks(Settings())


def test_sink_that_fails_is_removed_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written: list[tuple[int, dict[str, float]]] = []
    quick = threading.Event()

    class Keeps:
        def write(self, step: int, values: Mapping[str, float]) -> None:
            quick.wait(10)
            written.append((step, dict(values)))

        def close(self) -> None:
            raise OSError("gone")

    class Breaks(Keeps):
        def write(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("full")

    many = Sinks(Settings(), tmp_path, "job-1", "sums", [Breaks(), Keeps()])
    for step in (1, 2):
        many.write({"step": step, "reward": 0.5, "note": "text", "loss": None, "parts": {"format": 1, "nan": math.nan}})
    assert not written, "a slow sink keeps nobody waiting"
    quick.set()
    many.close()
    assert written == [(step, {"reward": 0.5, "parts/format": 1.0}) for step in (1, 2)]
    assert "Breaks failed" in caplog.text and caplog.text.count("Breaks failed") == 1 and "closed" in caplog.text


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="the tensorboard extra is not installed")
def test_tensorboard_receives_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    many = Sinks(Settings(tensorboard=True), tmp_path, "job-1", "sums")
    many.write({"step": 3, "reward": 0.25})
    many.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(3, 0.25)]


def test_log_lines_have_context_fields_and_logging_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "service.jsonl"
    logger = logging.getLogger("rookery.test")
    package = logging.getLogger("rookery")
    before = (package.level, package.propagate, list(package.handlers))
    with log.logging_to([log.file_handler(path)], "INFO"):
        logger.debug("not shown")
        logger.info("step %d", 3, extra={"tenant": "t", "job": "j", "version": 0})
        try:
            raise ValueError("wrong")
        except ValueError:
            logger.exception("it broke")
    logger.error("after")
    assert (package.level, package.propagate, list(package.handlers)) == before
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["message"] == "step 3" and (first["tenant"], first["job"], first["version"]) == ("t", "j", 0)
    assert first["level"] == "info" and first["room"] == "test" and "traceback" not in first
    assert "ValueError: wrong" in second["traceback"]
    record = logging.makeLogRecord({"msg": "hello", "levelno": logging.WARNING, "levelname": "WARNING", "job": "j"})
    assert log.TerminalLines().format(record).endswith("warning: hello  [job=j]")


HANGS = """
import gc, logging, threading, weakref
from rookery.telemetry import log

class Hangs(logging.Handler):
    begun, released = threading.Event(), threading.Event()

    def emit(self, record):
        self.begun.set()
        self.released.wait()

class Large:
    pass

def fail(held):
    raise ValueError(f"wrong {type(held).__name__}")

logger, hangs, large = logging.getLogger("rookery.test"), Hangs(), Large()
lives = weakref.ref(large)
with log.logging_to([hangs], "INFO", waiting_lines=2):
    logger.info("first")
    assert hangs.begun.wait(60)
    try:
        fail(large)
    except ValueError:
        logger.exception("it broke")
    del large
    gc.collect()
    print(lives())
    for _ in range(4):
        logger.info("more")
    print(log.dropped_lines())
    hangs.released.set()
"""


def test_lines_that_wait_hold_no_objects_and_those_dropped_are_counted() -> None:
    """In a separate process: lines of other services of this one would count, and be kept by pytest."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120)
    assert (ended.stdout.split(), ended.stderr) == (["None", "3"], "")


def test_a_terminal_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    """Nobody reads the pipe, which takes 64 KB."""
    program = (
        "import logging, sys; from rookery.telemetry import log; log.STOP_SECONDS = 0.1\n"
        "with log.logging_to([log.terminal_handler()], 'INFO'):\n"
        "    for number in range(200): logging.getLogger('rookery.test').info('a' * 1900)\n"
        "print('ended', flush=True)\n"
        "logging.shutdown()\n"
        "print('shut', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.read(len("ended\nshut\n")) == b"ended\nshut\n"
        finally:
            process.kill()


def view(**more: Any) -> dict[str, Any]:
    shown = {"id": "job-1", "name": "sums", "state": "running", "step": 3, "steps": 40, "reward": 0.5, "staleness": 0.0}
    return {
        **shown,
        "rewards": [0.0, 0.5, 1.0],
        "tokens_per_second": 120.4,
        "waits_for": "trainer",
        "reason": "",
        **more,
    }


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_full_disk_loses_log_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "service.jsonl"
    handler = log.file_handler(path)
    with log.logging_to([handler], "INFO"):
        path.symlink_to("/dev/full")
        logging.getLogger("rookery.test").info("lost")


@pytest.mark.parametrize("gone", ["deleted", "renamed", "folder deleted", "folder renamed", "replaced", "kept"])
def test_a_log_file_without_its_name_is_made_again(gone: str, tmp_path: Path) -> None:
    """An operator deletes it, or logrotate renames it, while the service runs."""
    path, other = tmp_path / "logs" / "service.jsonl", tmp_path / "other"
    logger, writes = logging.getLogger("rookery.test"), log.file_handler(path)

    def last() -> str:
        return str(json.loads(path.read_text(encoding="utf-8").splitlines()[-1])["message"])

    with log.logging_to([writes], "INFO"):
        logger.info("first")
        until(lambda: path.exists() and path.read_text(encoding="utf-8").endswith("\n"))
        match gone:
            case "deleted":
                path.unlink()
            case "renamed":
                path.rename(other)
            case "folder deleted":
                shutil.rmtree(path.parent)
            case "folder renamed":
                path.parent.rename(other)
            case "replaced":
                other.touch()
                other.replace(path)
        logger.info("second")
        until(lambda: path.exists() and path.read_text(encoding="utf-8").endswith("\n") and last() == "second")
        logger.info("third")
    assert last() == "third"
    assert path.read_text(encoding="utf-8").count("\n") == (3 if gone == "kept" else 2)


def test_job_table_shows_progress_and_exports_to_svg() -> None:
    console = Console(record=True, width=110, file=io.StringIO())
    console.print(job_table([view(), view(name="[red]", state="paused", reason="most episodes fail", reward=None)]))
    text = console.export_text(clear=False)
    for part in ("sums", "running", "3/40", "0.500", "▁", "█", "120", "trainer", "[red]", "most episodes fail"):
        assert part in text
    assert "<svg" in console.export_svg(title="rookery")
    assert "job-1" not in text


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=40), st.integers(1, 20))
@example([1.5e308, -1.5e308], 2)
def test_sparkline_accepts_any_values_and_keeps_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3]) == "▁▃▆█" and sparkline([2, 2]) == "▁▁" and sparkline([None, 1, 2]) == " ▁█"


def test_worker_table_shows_every_state() -> None:
    beat = {"active": 3, "waiting": 2}
    row = {
        "name": "one", "kind": "preemptible", "state": "serving", "seconds": 7300.0, "model": "m", "roles": ["rollout"],
        "engine": "vllm", "adapters": 4, "tokens_per_second": 81.4, "price": 0.5, "note": "", "beat": beat, "site": "",
    }  # fmt: skip
    joining = row | {"name": "[two]", "state": "joining", "seconds": 5.0, "beat": None, "note": "its gate is closed"}
    console = Console(record=True, width=128, file=io.StringIO())
    console.print(worker_table([row, joining]))
    first, second = [line.split() for line in console.export_text().splitlines() if "preemptible" in line]
    assert first == ["one", "preemptible", "serving", "2", "h", "m", "vllm", "rollout", "4", "3", "2", "81", "0.5"]
    assert second[:5] == ["[two]", "preemptible", "joining", "5", "s"]
    assert second[-4:] == ["its", "gate", "is", "closed"]


FORGED = (
    "session with SDK 1\n12:00:00 error: the disk is full",
    "a\r\x1b[2K12:00:00 ready",
    "a\x85b\u2028c",
    "\u202egnp.exe",
    "a\x9b31mred",
)


@pytest.mark.parametrize("text", FORGED)
def test_log_line_of_untrusted_text_is_one_printable_line(text: str) -> None:
    record = logging.makeLogRecord(
        {"name": "rookery.x", "msg": "%s", "args": (text,), "levelno": 20, "levelname": "INFO", "worker": text}
    )
    for formatter in (log.TerminalLines(), log.ProcessLines(), log.JsonLines()):
        line = formatter.format(record)
        assert line.isprintable() and line.splitlines() == [line], line


def test_log_line_of_a_long_text_is_short() -> None:
    text = "x" * 20_000_000
    try:
        raise ValueError(text)
    except ValueError:
        info = sys.exc_info()
    record = logging.makeLogRecord(
        {"name": "rookery.x", "msg": text, "levelno": 20, "levelname": "INFO", "exc_info": info}
    )
    for formatter in (log.TerminalLines(), log.ProcessLines(), log.JsonLines()):
        assert len(formatter.format(record)) < 10_000
