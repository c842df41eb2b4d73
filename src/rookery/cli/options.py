"""Connection options and exit codes of all commands."""

from __future__ import annotations

import functools
import inspect
import math
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from rookery.aio import INTERRUPTED as INTERRUPTED
from rookery.aio import end_signals
from rookery.cli.output import print_json, show
from rookery.client import Client
from rookery.errors import EXIT_REFUSED, RookeryError, UserError, short
from rookery.folders import named_path
from rookery.settings import CLIENT_SETTINGS, Settings

COMPLETED = 0
FAILED = 1
"""The job failed or paused, or something went wrong that is not the user's mistake, such as a service that does not
answer: a later try can succeed."""
REFUSED = 2
"""Refused or used wrongly: nothing was done."""
CANCELLED = 3
"""The job was cancelled."""

EXIT_CODES = (
    "Exit codes: 0 completed, 1 failed, 2 refused or used wrongly, 3 cancelled, 130 interrupted by Ctrl-C or SIGTERM."
)

ENDINGS = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED, "paused": FAILED}
"""Exit codes by the state of a job."""

UNITS = {"m": 60, "h": 3600, "d": 86400}
"""Seconds in each unit of a duration."""

MOST_DIGITS = 6
"""Of a duration: more days than any service runs."""

P = ParamSpec("P")
R = TypeVar("R")


def path_option(*names: str, **more: Any) -> Any:
    """An option for a path. A shell leaves the ``~`` of ``--option=~/folder``: it is replaced here."""
    return typer.Option(*names, parser=_path, metavar="PATH", **more)


def path_argument(**more: Any) -> Any:
    """An argument for a path, in which ``~`` is replaced."""
    return typer.Argument(parser=_path, **more)


def _path(given: str | Path) -> Path:
    """The path, which is neither empty nor ``-``: no command reads a file from standard input or writes one to
    standard output."""
    return named_path(_written(given))


def folder_option(*names: str, **more: Any) -> Any:
    """An option for a folder with a setting, which replaces its ``~``."""
    return typer.Option(*names, parser=lambda given: Path(_written(given)), metavar="PATH", **more)


def _written(given: str | Path) -> str | Path:
    if str(given) in ("", "-"):
        raise typer.BadParameter(f"given '{given}', allowed: a path; a file of the name - is ./-")
    return given


def number_option(*names: str, **more: Any) -> Any:
    """An option for a number, which is finite: no bound refuses ``nan``."""
    return typer.Option(*names, callback=_finite, **more)


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"given {value}, allowed: a finite number")
    return value


@contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Within, each signal that asks the process to end, also that of a closed terminal, does so in the same orderly way
    as Ctrl-C."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in end_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_line(output: str) -> str:
    """The last line that a child process wrote: its interpreter may print others as it starts."""
    return (output.strip().splitlines() or [""])[-1]


def check_child(done: subprocess.CompletedProcess[Any], task: str) -> None:
    """Raises the error of a child process that failed, with its last line: :class:`UserError` where another try cannot
    succeed."""
    if done.returncode < 0:
        raise RookeryError(f"signal {-done.returncode} ended {task}; memory must be free for the model")
    if done.returncode:
        kind = UserError if done.returncode == EXIT_REFUSED else RookeryError
        raise kind(last_line(done.stderr or "") or f"{task}: the process ended with code {done.returncode}")


def duration(option: str, given: str) -> float:
    """Seconds of a duration such as 30d. Raises :class:`UserError`."""
    number, unit = given[:-1], UNITS.get(given[-1:])
    if unit is None or not (number.isascii() and number.isdecimal()) or len(number) > MOST_DIGITS or int(number) == 0:
        raise UserError(f"{option}: given {short(given)}, allowed is a number with m, h or d, such as 30d")
    return float(int(number) * unit)


@dataclass(frozen=True)
class Cli:
    """The options that every command takes, and its output."""

    settings: Settings
    json: bool
    data: Path | None
    """The data folder, where the option or its variable gives one."""
    options: Mapping[str, Any]
    """The given options, of which None is absent."""

    def every_setting(self, *more: str) -> Settings:
        """``settings`` has a client's alone. These are all, or a client's and ``more``. Raises
        :class:`~rookery.errors.UserError`."""
        return Settings.load(uses=(*CLIENT_SETTINGS, *more) if more else None, **self.options)

    def client(self) -> Client:
        return Client(settings=self.settings)

    def show(self, value: Any, line: str) -> None:
        """Prints ``value`` as JSON, or ``line`` for a person."""
        if self.json:
            print_json(value)
        else:
            show(line)

    def show_rows(self, rows: Sequence[Any], table: Callable[[], Any], empty: str = "none") -> None:
        """Prints the rows as one JSON list, or the table, or where there is no row the line ``empty``."""
        if self.json:
            print_json(list(rows))
        else:
            show(table() if rows else empty)


UrlOption = Annotated[str | None, typer.Option("--url", help="The service's address.", envvar="ROOKERY_URL")]
KeyOption = Annotated[str | None, typer.Option("--key", help="An API key.", envvar="ROOKERY_KEY", show_envvar=True)]
DataOption = Annotated[Path | None, folder_option("--data", help="The data folder.", envvar="ROOKERY_DATA")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, for scripts; while a job is followed, one per line.")
]
OPTIONS: dict[str, tuple[Any, Any]] = {
    "url": (UrlOption, None),
    "key": (KeyOption, None),
    "data": (DataOption, None),
    "json": (JsonOption, False),
}
"""The options of every command that talks to a service, with their defaults."""


def with_options(command: Callable[Concatenate[Cli, P], R]) -> Callable[P, R]:
    """A command of typer with the options of :data:`OPTIONS`, which reach ``command`` as its first argument. Options
    win over ``ROOKERY_*`` variables, which win over defaults."""

    @functools.wraps(command)
    def wrapper(*args: Any, **given: Any) -> R:
        url, key, data, as_json = (given.pop(name) for name in OPTIONS)
        given_options = {"url": url, "key": key, "data": data}
        cli = Cli(Settings.load(uses=CLIENT_SETTINGS, **given_options), as_json, data, given_options)
        return command(cli, *args, **given)

    signature = inspect.signature(command, eval_str=True)
    _, *parameters = signature.parameters.values()
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in OPTIONS.items()
    ]
    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del wrapper.__wrapped__
    return wrapper
