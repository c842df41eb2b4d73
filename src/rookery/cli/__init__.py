"""The command line, ``rookery``: its sub-commands, and the conversion of every error into one line and an exit code. It
never imports torch; a worker is a separate process."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from rookery.cli import (
    adapters,
    admin,
    demo,
    doctor,
    jobs,
    models,
    page,
    plan,
    run,
    secrets,
    serve,
    simulate,
    top,
    trace,
)
from rookery.cli.options import EXIT_CODES, FAILED, INTERRUPTED, OPTIONS, REFUSED, ended_like_ctrl_c
from rookery.cli.output import OutputLost, flush_output, prepare_streams, show
from rookery.errors import NO_ROOM, RookeryError, TooManyRequests, UserError, to_stderr
from rookery.settings import trim_variables
from rookery.telemetry.rows import printable

app = typer.Typer(
    help="Many LoRA policies learn by reinforcement at once, on one resident base model.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("serve")(serve.serve)
app.command("open")(page.open_page)
app.command("top")(top.top)
app.command("trace")(trace.trace)
app.command("run", epilog=EXIT_CODES)(run.run)
app.add_typer(jobs.app, name="jobs")
app.add_typer(adapters.app, name="adapters")
app.add_typer(jobs.uploads, name="uploads")
app.add_typer(secrets.app, name="secrets")
app.command("chat")(models.chat)
app.command("models")(models.models)
app.command("worker")(serve.worker)
app.command("workers")(admin.workers)
app.add_typer(admin.app, name="tenants")
app.command("simulate")(simulate.simulate)
app.command("plan")(plan.plan)
app.command("profile")(plan.profile)
app.command("costs")(admin.costs)
app.command("backup")(admin.backup)
app.command("restore")(admin.restore)
app.command("doctor")(doctor.doctor)

DEBUG = "--debug"


def flow(group: typer.Typer) -> None:
    """Give every command its docstring as help in lines as wide as the terminal, not as wide as the source."""
    for command in group.registered_commands:
        paragraphs = inspect.cleandoc((command.callback and command.callback.__doc__) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(one.split()) for one in paragraphs).replace("``", "")
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            flow(inner.typer_instance)


flow(app)


def print_version(wanted: bool) -> None:
    """Print the version of this program and end."""
    if wanted:
        show(f"rookery {version('rookery')}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks; may stand anywhere.")] = False,
    shown: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Many LoRA policies learn by reinforcement at once, on one resident base model."""


def check_order(given: Sequence[str]) -> None:
    """Raises :class:`UserError` for an option of commands in front of its command."""
    inside = given[1:] if given and given[0] in {group.name for group in app.registered_groups} else given
    option = inside[0].partition("=")[0] if inside else ""
    if option.startswith("--") and option[2:] in OPTIONS:
        raise UserError(f"{option}: it stands behind the command, as in rookery jobs list {option}")


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    prepare_streams()
    trim_variables(os.environ)
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    try:
        try:
            with ended_like_ctrl_c():
                given = [argument for argument in given if argument != DEBUG]
                check_order(given)
                app(given, prog_name="rookery")
        finally:
            flush_output()
    except RookeryError as error:
        if debug:
            raise
        problems = getattr(error, "problems", None) or [str(error)]
        to_stderr(*(f"rookery: {printable(line)}" for line in problems))
        refused = error.status < RookeryError.status and not isinstance(error, TooManyRequests)
        sys.exit(REFUSED if refused else FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            to_stderr(f"rookery: {OutputLost(error)}")
            sys.exit(FAILED)
        if isinstance(error, PermissionError) or (isinstance(error, OSError) and error.filename is not None):
            where, reason = error.filename or "a file", (error.strerror or str(error)).lower()
            to_stderr(f"rookery: {printable(str(where))}: {reason}; give another folder or file")
            sys.exit(REFUSED)
        line = " ".join(f"{type(error).__name__}: {error}".split())
        to_stderr(f"rookery: internal error: {printable(line)} ({DEBUG} shows where)")
        sys.exit(FAILED)
