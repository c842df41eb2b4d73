"""What the commands share: their options, exit codes, how they print and how they find the service."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rookery.client import Client
from rookery.settings import Settings

COMPLETED = 0
FAILED = 1
"""The job failed or paused by itself, or something went wrong that is not the user's mistake, such as a service that is
not there: trying again later can help."""
REFUSED = 2
"""Refused or used wrongly: nothing was done."""
CANCELLED = 3
INTERRUPTED = 130

EXIT_CODES = "Exit codes: 0 completed, 1 failed, 2 refused or used wrongly, 3 cancelled, 130 interrupted."

Url = Annotated[str | None, typer.Option("--url", help="The service's address.", envvar="ROOKERY_URL")]
Key = Annotated[str | None, typer.Option("--key", help="An API key.", envvar="ROOKERY_KEY", show_envvar=True)]
Data = Annotated[Path | None, typer.Option("--data", help="The data folder.", envvar="ROOKERY_DATA")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

ENDINGS = {"completed": COMPLETED, "failed": FAILED, "cancelled": CANCELLED, "paused": FAILED}


def settings_of(url: str | None = None, key: str | None = None, data: Path | None = None, **more: Any) -> Settings:
    """Options win over ``ROOKERY_*`` variables, which win over defaults."""
    return Settings.load(url=url, key=key, data=data, **more)


def client_of(url: str | None, key: str | None, data: Path | None) -> Client:
    return Client(settings=settings_of(url, key, data))


def time_of(seconds: float) -> str:
    """Unix seconds as a person reads them; nothing for 0."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""


PIPED_WIDTH = 160
"""Columns of a table that is not shown on a terminal: enough to cut nothing."""


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def plain_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def show(value: Any, json: bool, line: str) -> None:
    """What was made: as JSON, or as one line for a person."""
    if json:
        print_json(value)
    else:
        console().print(line, markup=False)


def print_json(value: Any) -> None:
    """One line: a script reads lines."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def figures(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    """The numbers of a row that are there, as ``name value``."""
    shown = [(name, row.get(name)) for name in names]
    return "  ".join(f"{name} {value:.4g}" for name, value in shown if isinstance(value, int | float))
