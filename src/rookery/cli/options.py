"""Connection options, exit codes and output formats of all commands."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rookery.client import Client
from rookery.settings import CLIENT_SETTINGS, Settings
from rookery.telemetry.table import add_columns

COMPLETED = 0
FAILED = 1
"""The job failed or paused, or something went wrong that is not the user's mistake, such as a service that does not
answer: a later try can succeed."""
REFUSED = 2
"""Refused or used wrongly: nothing was done."""
CANCELLED = 3
INTERRUPTED = 130

EXIT_CODES = "Exit codes: 0 completed, 1 failed, 2 refused or used wrongly, 3 cancelled, 130 interrupted."

ENDINGS = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED, "paused": FAILED}
"""Exit codes by the state of a job."""

PIPED_WIDTH = 160
"""Columns of a table that is not shown on a terminal: enough to cut nothing."""

P = ParamSpec("P")
R = TypeVar("R")


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
            console().print(line, markup=False)

    def show_rows(self, rows: Iterable[Any], table: Callable[[], Any]) -> None:
        """Prints one line of JSON per row, or the table."""
        if self.json:
            for row in rows:
                print_json(row)
        else:
            console().print(table())


UrlOption = Annotated[str | None, typer.Option("--url", help="The service's address.", envvar="ROOKERY_URL")]
KeyOption = Annotated[str | None, typer.Option("--key", help="An API key.", envvar="ROOKERY_KEY", show_envvar=True)]
DataOption = Annotated[Path | None, typer.Option("--data", help="The data folder.", envvar="ROOKERY_DATA")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
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


def time_of(seconds: float) -> str:
    """Unix seconds as local time; empty for 0."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def plain_table(left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """An empty table with columns aligned to the left and to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    add_columns(table, left, right)
    return table


def print_json(value: Any) -> None:
    """One line: scripts read lines."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def figures(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The numbers of a row that are present, as ``name value``."""
    shown = [(name, row.get(name)) for name in names]
    return "  ".join(f"{name} {value:.4g}" for name, value in shown if isinstance(value, int | float))
