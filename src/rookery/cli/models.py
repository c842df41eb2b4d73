"""``rookery models`` shows and prepares base models; ``rookery chat`` chats with one, or with a job's policy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rookery.children import child_variables, interpreter
from rookery.cli.options import Cli, check_child, last_line, number_option, path_option, with_options
from rookery.cli.output import print_json, visible, writing
from rookery.errors import Unavailable, UserError
from rookery.folders import usable_cache
from rookery.telemetry.rows import Rows, columns
from rookery.tokenization.registry import CATALOGUE, prepared_models, resolve, status


@with_options
def models(
    cli: Cli,
    get: Annotated[str | None, typer.Option("--get", help="Fetch and prepare this model now.")] = None,
    export: Annotated[
        Path | None,
        path_option(
            "--export",
            help="Write the model of --get, or the first of ROOKERY_MODELS, to this new folder for"
            " transformers and PEFT.",
        ),
    ] = None,
) -> None:
    """Base models: loaded, prepared, known, or refused with the reason; the engine and trainer of each, and why.
    Without a service, those on this machine."""
    if export is not None:
        get = get or cli.every_setting("models").server.models.split(",")[0].strip()
        if not get:
            raise UserError("--export: ROOKERY_MODELS names no model; say which one with --get")
    if get is not None:
        prepare(cli, get, export)
        return
    rows = _rows(cli)
    table = Rows(columns(("model", "state", "engine", "trainer"), notes=("notes",)))
    for row in rows:
        notes = row["reason"] or "; ".join(filter(None, (row["note"], row["why"])))
        table.add(*(str(row[column]) for column in ("name", "state", "engine", "trainer")), notes)
    cli.show_rows(rows, lambda: table)


def prepare(cli: Cli, name: str, export: Path | None = None) -> None:
    """Fetches and converts a model into the cache, in a child process, because that needs torch; writes the published
    layout to the new folder ``export``. Raises the error of that process (:func:`check_child`)."""
    resolve(name)  # refuses an impossible name before a process is started for it
    if export is not None and export.exists():
        raise UserError(f"--export: {export} exists; give a new folder")
    usable_cache(cli.settings.cache)
    command = interpreter("rookery.worker.model.convert", name, "--cache", str(cli.settings.cache))
    if export is not None:
        command += ["--export", str(export)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", errors="replace", env=child_variables()
    )
    check_child(done, f"preparing {name}")
    folder = last_line(done.stdout)
    line = f"{name} is prepared: {folder}"
    if export is not None:
        line = f"{name} is written to {export}, which transformers and PEFT load"
    cli.show({"name": name, "state": "prepared", "folder": folder, "export": str(export or "")}, line)


def _rows(cli: Cli) -> list[dict[str, Any]]:
    try:
        with cli.client() as client:
            return [dict(row) for row in client.models()]
    except Unavailable:
        if cli.settings.server.url:
            raise
    settings = cli.every_setting("inference_engine", "trainer")
    found = [status(settings.cache, name) for name in (*CATALOGUE, *prepared_models(settings.cache))]
    chosen = [row.backends(settings.engine.inference_engine, settings.training.trainer) for row in found]
    return [
        {"name": row.name, "state": row.state, "reason": row.reason, "note": row.note} | asdict(backends)
        for row, backends in zip(found, chosen, strict=True)
    ]


@with_options
def chat(
    cli: Cli,
    target: Annotated[
        str,
        typer.Argument(
            metavar="JOB[/POLICY][@VERSION]", help="A job, its newest version or this one, or a base model."
        ),
    ],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Send this, print the reply, exit.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one reply at most.", min=1)] = 256,
    temperature: Annotated[float, number_option(help="0 takes the likeliest token each time.", min=0, max=10)] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same reply.", min=0)] = None,
) -> None:
    """Chat with a job's policy or a base model; replies are shown as they are sampled. An empty line or Ctrl-D ends the
    chat; piped input is one message."""
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    if message is not None and not message.strip():
        raise UserError("no message: give one with --message, or on standard input")
    messages = [{"role": "system", "content": system}] if system else []
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        sampling["seed"] = seed
    with cli.client() as client:
        while True:
            content = message if message is not None else _read_line()
            if not content:
                return
            messages.append({"role": "user", "content": content})
            if cli.json:
                reply = client.sample(target, messages, **sampling)
                print_json(reply)
                text = reply.text
            else:
                text = _print_stream(client.stream(target, messages, **sampling))
            if message is not None:
                return
            messages.append({"role": "assistant", "content": text})


def _print_stream(chunks: Iterator[str]) -> str:
    """Prints each chunk when it arrives; returns the whole text."""
    text = ""
    for chunk in chunks:
        with writing():
            print(visible(chunk), end="", flush=True)
        text += chunk
    with writing():
        print(flush=True)
    return text


def _read_line() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt) as end:
        print()  # what follows begins a line
        if isinstance(end, KeyboardInterrupt):
            raise
        return ""
