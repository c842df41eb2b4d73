"""Output to any stream: encodings, pipes, terminals, closed and full ones."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rookery.cli.output import show

CODE = """
import sys
from rookery.cli.output import console, flush_output, is_terminal, prepare_streams, print_json, show
from rookery.telemetry.table import job_list
prepare_streams()
job = {"name": "größe-数", "id": "job-1", "state": "running", "step": 1, "reward": 0.5, "waits_for": "engine – 3"}
show("0.5 ± 0.1 ▁█ → né 数")
show(job_list([job]))
print_json({"text": "né ▁ 数"})
print("terminal", is_terminal(), console().width)
flush_output()
"""


def written(monkeypatch: pytest.MonkeyPatch, encoding: str) -> bytes:
    """The output of the code to a stream of this encoding that is no terminal."""
    stream = io.TextIOWrapper(content := io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as here:
        here.setattr(sys, "stdout", stream)
        exec(CODE, {})
        return content.getvalue()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8", "utf-16", "shift_jis"])
def test_every_encoding_takes_every_text(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = written(monkeypatch, encoding).decode(encoding)
    assert json.loads(next(line for line in text.splitlines() if line.startswith("{"))) == {"text": "né ▁ 数"}
    assert "job-1" in text
    shown = {"latin-1": "0.5 ± 0.1 18 -> né ?", "ascii": "0.5 +/- 0.1 18 -> n? ?", "utf-8": "0.5 ± 0.1 ▁█ → né 数"}
    assert shown.get(encoding, "0.5 ") in text


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_pipe_gets_no_cursor_codes_on_any_platform(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = written(monkeypatch, "utf-8")
    assert b"terminal False 160" in text
    assert b"\x1b[?25" not in text and b"\x1b[2K" not in text


@pytest.mark.parametrize("closed", ["1", "0,1,2"])
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    """And no file that is opened later gets their place."""
    close = " ".join(f"{number}{'<' if number == '0' else '>'}&-" for number in closed.split(","))
    later = CODE + f"\nfile = open({str(tmp_path / 'later')!r}, 'w')\nprint('lost')\nassert file.fileno() > 2\n"
    (tmp_path / "code.py").write_text(later, encoding="utf-8")
    command = f"{sys.executable} {tmp_path / 'code.py'} {close}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "later").read_text(encoding="utf-8") == ""


def main_with(arguments: str, redirect: str) -> subprocess.CompletedProcess[bytes]:
    command = f"{sys.executable} -m rookery.cli {arguments} {redirect}"
    return subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["models --json", "--help", "jobs list --help", "--version"])
def test_a_full_disk_under_the_output_is_one_line(arguments: str) -> None:
    done = main_with(arguments, "> /dev/full")
    assert done.returncode == 1
    assert (
        done.stderr.decode()
        == "rookery: the output cannot be written (No space left on device); give it another place\n"
    )


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    done = main_with("models", "| true")
    assert done.stderr == b"" and done.returncode in (0, 1)


@pytest.mark.parametrize("odd", ["\x1b[31m", "\x1b]0;title\x07", "\x9b2J", "\r", "\x08", "\x00"])
@pytest.mark.parametrize("within", [str, Text, lambda text: rows_of(text)], ids=["line", "Text", "table"])
def test_foreign_text_never_moves_the_cursor(
    odd: str, within: Callable[[str], RenderableType], capsys: pytest.CaptureFixture[str]
) -> None:
    show(within(f"be{odd}fore"))
    printed = capsys.readouterr().out
    assert printed.strip() and all(letter == "\n" or letter.isprintable() for letter in printed), repr(printed)


def rows_of(text: str) -> Table:
    table = Table(text)
    table.add_row(text)
    return table


def test_a_terminal_of_eighty_columns_is_used_whole() -> None:
    parent, child = pty.openpty()
    os.set_inheritable(child, True)
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    done = subprocess.Popen([sys.executable, "-c", CODE], stdout=child, env=environment)
    os.close(child)
    text = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    os.close(parent)
    assert done.wait(60) == 0
    assert b"terminal True 80" in text
