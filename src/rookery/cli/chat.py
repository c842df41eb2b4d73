"""``rookery chat``: talk with a job's policy, or with a base model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.control import strip_control_codes

from rookery.cli.common import Data, Json, Key, Url, client_of, print_json
from rookery.client import Client
from rookery.errors import NotFound
from rookery.tokenization.registry import CATALOGUE


def chat(
    target: Annotated[str, typer.Argument(metavar="JOB[@VERSION]", help="A job, its newest version or this one.")],
    message: Annotated[str | None, typer.Option("--message", "-m", help="Say this, print the reply, end.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of one reply at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.", min=0, max=10)] = 0.7,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same reply.", min=0)] = None,
    url: Url = None,
    key: Key = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Talk with what a job learned, or with a base model; replies are shown as they are sampled. An empty line or
    Ctrl-D ends; piped input is one message."""
    if message is None and not sys.stdin.isatty():
        message = sys.stdin.read().strip()
    messages = [{"role": "system", "content": system}] if system else []
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        sampling["seed"] = seed
    with client_of(url, key, data) as client:
        named = _target(client, target)
        while True:
            said = message if message is not None else _ask()
            if not said:
                return
            messages.append({"role": "user", "content": said})
            if json:
                reply = client.sample(named, messages, **sampling)
                print_json(reply)
                text = reply.text
            else:
                text = _shown(client.stream(named, messages, **sampling))
            if message is not None:
                return
            messages.append({"role": "assistant", "content": text})


def _shown(pieces: Iterator[str]) -> str:
    """The whole text, each piece printed when it comes."""
    text = ""
    for piece in pieces:
        print(strip_control_codes(piece), end="", flush=True)
        text += piece
    print()
    return text


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def _target(client: Client, target: str) -> str:
    """A job's name is looked up; a base model's stands for itself."""
    name, at, version = target.rpartition("@") if "@" in target else (target, "", "")
    try:
        return client.job(name).id + at + version
    except NotFound:
        if name in CATALOGUE or "/" in name:
            return target
        raise
