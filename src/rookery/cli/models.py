"""``rookery models``: the base models and their states."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Any

import typer

from rookery.cli.common import Cli, plain_table, with_options
from rookery.errors import Unavailable, UserError
from rookery.tokenization.registry import CATALOGUE, resolve, status


@with_options
def models(
    cli: Cli,
    get: Annotated[str | None, typer.Option("--get", help="Fetch and prepare this model now.")] = None,
) -> None:
    """Base models: loaded, prepared, known, or refused with the reason. Without a service, those on this machine."""
    if get is not None:
        prepare(cli, get)
        return
    rows = _rows(cli)
    table = plain_table()
    for column in ("model", "state", "notes"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(str(row["name"]), str(row["state"]), str(row["reason"] or row["note"]))
    cli.show_rows(rows, lambda: table)


def prepare(cli: Cli, name: str) -> None:
    """Fetches and converts a model into the cache, in a child process, because that needs torch. Raises
    :class:`UserError` with the last line of that process."""
    resolve(name)  # refuses an impossible name before a process is started for it
    command = [sys.executable, "-m", "rookery.worker.model.convert", name, "--cache", str(cli.settings.cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise UserError(lines[-1] if lines else f"preparing {name} ended with {done.returncode}")
    folder = done.stdout.strip()
    cli.show({"name": name, "state": "prepared", "folder": folder}, f"{name} is prepared: {folder}")


def _rows(cli: Cli) -> list[dict[str, Any]]:
    try:
        with cli.client() as client:
            return [dict(row) for row in client.models()]
    except Unavailable:
        if cli.settings.server.url:
            raise
    found = [status(cli.settings.cache, name) for name in CATALOGUE]
    return [{"name": row.name, "state": row.state, "reason": row.reason, "note": row.note} for row in found]
