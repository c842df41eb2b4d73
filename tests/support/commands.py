"""The commands of the command line, for tests of all of them."""

from __future__ import annotations

from typing import Any

import typer

from rookery.cli import app


def commands(group: Any = None) -> dict[str, Any]:
    """Every command by its words, such as ``jobs list``."""
    found = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        inner = commands(command) if hasattr(command, "commands") else {"": command}
        found |= {f"{name} {rest}".strip(): one for rest, one in inner.items()}
    return found


def options_of(command: Any) -> set[str]:
    """The options of a command, as they are written."""
    return {one for given in command.params for one in given.opts + given.secondary_opts if one.startswith("-")}
