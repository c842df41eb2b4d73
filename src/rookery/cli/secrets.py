"""``rookery secrets …``: texts that jobs use by name, such as the keys of sinks."""

from __future__ import annotations

import sys
from getpass import getpass
from typing import Annotated

import typer

from rookery.cli.options import Cli, with_options
from rookery.cli.output import time_of
from rookery.errors import UserError
from rookery.telemetry.rows import Rows, columns

app = typer.Typer(
    help="Texts that jobs use by name, such as the keys of sinks. None is ever shown.", no_args_is_help=True
)

SecretName = Annotated[str, typer.Argument(metavar="NAME", help="The secret's name.")]


@app.command("set")
@with_options
def set_secret(cli: Cli, name: SecretName) -> None:
    """Store a secret, or replace it. Its text is read from standard input, or asked for: it is in no history."""
    value = _typed() if sys.stdin.isatty() else sys.stdin.read(5000)
    if not value.strip():
        raise UserError("no secret on standard input; for example: rookery secrets set wandb < key.txt")
    with cli.client() as client:
        client.set_secret(name, value.strip())
    cli.show({"name": name}, f"{name} is set; a job names it as secret of a sink")


def _typed() -> str:
    try:
        return getpass("Secret: ")
    except EOFError:
        return ""


@app.command("list")
@with_options
def list_secrets(cli: Cli) -> None:
    """The names of the secrets of this key's tenant."""
    with cli.client() as client:
        found = client.secrets()
    table = Rows(columns(("secret", "set")))
    for row in found:
        table.add(row.name, time_of(row.created))
    cli.show_rows(found, lambda: table, "no secrets yet; rookery secrets set NAME stores one")


@app.command("delete")
@with_options
def delete_secret(cli: Cli, name: SecretName) -> None:
    """Delete a secret. Sinks that use it fail from then on."""
    with cli.client() as client:
        client.delete_secret(name)
    cli.show({"deleted": name}, f"{name} is deleted")
