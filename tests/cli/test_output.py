"""Output to any stream: encodings, pipes, terminals, closed and full ones."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rookery import cli
from rookery.cli.output import print_json, show, visible

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


def written(encoding: str, **variables: str) -> bytes:
    """The output of the code to a stream of this encoding that is no terminal."""
    stream = io.TextIOWrapper(content := io.BytesIO(), encoding=encoding)
    with contextlib.redirect_stdout(stream), patch.dict(os.environ, variables):
        exec(CODE, {})
        return content.getvalue()


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp1252", "utf-8", "utf-16", "shift_jis"])
def test_every_encoding_takes_every_text(encoding: str) -> None:
    text = written(encoding).decode(encoding)
    assert json.loads(next(line for line in text.splitlines() if line.startswith("{"))) == {"text": "né ▁ 数"}
    assert "job-1" in text
    shown = {"latin-1": "0.5 ± 0.1 18 -> né ?", "ascii": "0.5 +/- 0.1 18 -> n? ?", "utf-8": "0.5 ± 0.1 ▁█ → né 数"}
    assert shown.get(encoding, "0.5 ") in text


@pytest.mark.parametrize("letter", ["\x1b", "\x07", "\x7f", "\x80", "\x9b", "\x9f", "\u2028", "\u202e", "\u2069"])
def test_json_has_no_control_characters(letter: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {letter: f"é{letter}[31m"}
    print_json(value)
    line = capsys.readouterr().out.removesuffix("\n")
    assert json.loads(line) == value and visible(line) == line


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"])
def test_a_pipe_gets_no_cursor_codes_on_any_platform(variable: str) -> None:
    text = written("utf-8", **{variable: "1", "TERM": "xterm-256color"})
    assert b"terminal False 160" in text
    assert b"\x1b[?25" not in text and b"\x1b[2K" not in text


@pytest.mark.parametrize("closed", ["1", "0,1,2"])
def test_closed_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    """No file that is opened later gets their place."""
    close = " ".join(f"{number}{'<' if number == '0' else '>'}&-" for number in closed.split(","))
    later = CODE + f"\nfile = open({str(tmp_path / 'later')!r}, 'w')\nprint('lost')\nassert file.fileno() > 2\n"
    (tmp_path / "code.py").write_text(later, encoding="utf-8")
    command = f"{sys.executable} {tmp_path / 'code.py'} {close}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "later").read_text(encoding="utf-8") == ""


def test_an_internal_error_shows_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise AttributeError("no 'name' here; there is \x1b]0;x\x07\x9b31m")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit):
        cli.main([])
    line = capsys.readouterr().err.removesuffix("\n")
    assert "internal error: AttributeError: no 'name' here" in line and visible(line) == line


def main_with(arguments: str, redirect: str) -> subprocess.CompletedProcess[bytes]:
    command = f"{sys.executable} -m rookery.cli {arguments} {redirect}"
    return subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, timeout=120)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["models --json", "--help", "--version"])
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


@pytest.mark.parametrize(
    "odd",
    [
        "\x1b[31m",
        "\x1b]0;title\x07",
        "\x9b2J",
        "\r",
        "\x08",
        "\x00",
        "\x85",
        "\u2028",
        "\u2029",
        *"\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    ],
    ids=ascii,
)
@pytest.mark.parametrize("within", [str, Text, lambda text: rows_of(text)], ids=["line", "Text", "table"])
def test_foreign_text_never_moves_the_cursor(
    odd: str, within: Callable[[str], RenderableType], capsys: pytest.CaptureFixture[str]
) -> None:
    show(within(f"be{odd}fore"))
    printed = capsys.readouterr().out
    assert printed.strip() and all(letter == "\n" or letter.isprintable() for letter in printed), repr(printed)


@pytest.mark.parametrize(
    "text", ["👩\u200d💻", "می\u200cخواهم", "שלום\u200f!", "a\u00a0b", "soft\u00adhyphen", "né\t数"]
)
def test_letters_that_a_script_needs_are_printed(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(text)
    assert capsys.readouterr().out.replace("\t", " ").split() == text.replace("\t", " ").split()


def rows_of(text: str) -> Table:
    table = Table(text)
    table.add_row(text)
    return table


def test_a_terminal_without_a_size_gets_whole_lines() -> None:
    code = "import sys; from rookery.cli import main; sys.argv = ['rookery', 'jobs', '--help']; main()"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    usual, *others = (
        subprocess.run([sys.executable, "-c", code], capture_output=True, env={**environment, **more}, timeout=120)
        for more in ({}, {"COLUMNS": "0"}, {"COLUMNS": "1"}, {"COLUMNS": "19"})
    )
    assert usual.returncode == 0 and b"jobs" in usual.stdout
    assert all(other.stdout == usual.stdout for other in others)


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
