"""``rookery models``: which base models there are, and where they stand."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from rookery.cli.common import Data, Json, Key, Url, console, plain_table, print_json, settings_of, show
from rookery.client import Client
from rookery.errors import Unavailable, UserError
from rookery.settings import Settings
from rookery.tokenization.registry import CATALOGUE, resolve, status


def models(
    url: Url = None,
    key: Key = None,
    data: Data = None,
    get: Annotated[str | None, typer.Option("--get", help="Fetch and prepare this model now.")] = None,
    json: Json = False,
) -> None:
    """Base models: loaded, prepared, known, or refused and why. Without a service, what is on this machine."""
    settings = settings_of(url, key, data)
    if get is not None:
        prepare(settings, get, json)
        return
    rows = _rows(settings)
    if json:
        for row in rows:
            print_json(row)
        return
    table = plain_table()
    for column in ("model", "state", "notes"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(str(row["name"]), str(row["state"]), str(row["reason"] or row["note"]))
    console().print(table)


def prepare(settings: Settings, name: str, json: bool = False) -> None:
    """Fetches and converts a model into the cache, in a process of its own, which may take torch. Raises
    :class:`UserError` with that process's last line."""
    resolve(name)  # what cannot be a model is refused before a process is started for it
    command = [sys.executable, "-m", "rookery.worker.model.convert", name, "--cache", str(settings.cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UserError(lines[-1] if lines else f"preparing {name} ended with {done.returncode}")
    folder = done.stdout.strip()
    show({"name": name, "state": "prepared", "folder": folder}, json, f"{name} is prepared: {folder}")


def _rows(settings: Settings) -> list[dict[str, object]]:
    try:
        with Client(settings=settings) as client:
            return [dict(row) for row in client.models()]
    except Unavailable:
        if settings.server.url:
            raise
    found = [status(settings.cache, name) for name in CATALOGUE]
    return [{"name": row.name, "state": row.state, "reason": row.reason, "note": row.note} for row in found]
