"""Requests to a stranger's server end in time, and bad input is refused in one line."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from rookery import network
from rookery.children import take_child_seconds
from rookery.controller.job_sinks import Endpoint
from rookery.environments import openenv, outbound
from rookery.environments.builtins import find
from rookery.environments.judges import NamedJudge, ask_named
from rookery.environments.outbound import AnswerLimits, request_json, set_reachable_hosts
from rookery.environments.verifiers import pool
from rookery.errors import UserError
from rookery.settings import Settings
from rookery.spec.job import SinkSpec

HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def trickle() -> Iterator[Callable[[bytes, bytes], str]]:
    """Starts a server that sends a beginning, then one piece without end, and returns its address."""
    listeners: list[socket.socket] = []

    def start(beginning: bytes, piece: bytes) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            with contextlib.suppress(OSError):
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(beginning)
                    while piece:
                        peer.sendall(piece)
                        time.sleep(0.02)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(1 << 16):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/schema"

    yield start
    for one in listeners:
        one.close()


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        (b"", b"H"),
        (HEAD, b"X"),
        (HEAD + b"\r\n", b" "),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
)
def test_a_server_that_trickles_is_left_at_the_limit(
    beginning: bytes, piece: bytes, trickle: Callable[[bytes, bytes], str]
) -> None:
    url = trickle(beginning, piece)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"x: http://.* does not answer within 0.3 s"):
        request_json(url, "x", allowed="*", most=AnswerLimits(seconds=0.3))
    assert time.monotonic() - began < 60  # each wait alone would never end


def test_an_answer_before_the_limit_is_read(trickle: Callable[[bytes, bytes], str]) -> None:
    url = trickle(HEAD + b'Content-Length: 8\r\n\r\n{"a": 1}', b"")
    assert request_json(url, "x", {"b": "ü"}, allowed="*") == {"a": 1}


@pytest.mark.parametrize(
    "answer",
    [b"nonsense\r\n\r\n", HEAD + b"\r\n" + b"[" * 100_000, HEAD + b"\r\n\xff", HEAD + b"Content-Length: 9\r\n\r\n"],
)
def test_a_wrong_answer_is_one_line(answer: bytes, trickle: Callable[[bytes, bytes], str]) -> None:
    with pytest.raises(UserError) as caught:
        request_json(trickle(answer, b""), "x", allowed="*")
    assert "\n" not in str(caught.value)


HEADERS = [("X", "ключ"), ("X", "a\r\nB: c"), ("X", "a\n b"), ("X", "\0"), ("a b", "c"), ("", "c"), ("ü", "c")]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_cannot_be_sent_is_refused(header: tuple[str, str]) -> None:
    name, value = header
    options: dict[str, Any] = {"url": "http://8.8.8.8", "resets": [{}], "headers": {name: value}}
    for refused in (
        lambda: find("openenv").check(options),
        lambda: request_json("http://8.8.8.8", "x", headers={name: value}),
    ):
        with pytest.raises(UserError, match="the header") as caught:
            refused()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://8.8.8.8/ü", "http://ü..x/", "http://8.8.8.8/a b", "http://" + "a" * 300])
def test_an_address_that_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(UserError, match=r"^x: ") as caught:
        request_json(url, "x")
    assert "\n" not in str(caught.value)


@pytest.fixture
def inside() -> Iterator[tuple[str, list[str]]]:
    """A server that only the service may reach: its address, and what reached it."""
    reached: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, address = listener.accept()
                    reached.append(str(address))
                    peer.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/secret", reached


async def open_session(redirect: bytes) -> None:
    """A session of an OpenEnv server that answers for its schema, then with ``redirect``."""
    schema = HEAD + b'Content-Length: 14\r\n\r\n{"action": {}}'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in (schema, redirect):
                peer, _ = listener.accept()
                with peer:
                    peer.recv(1 << 16)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        made = await asyncio.to_thread(openenv.OpenEnv, openenv.OpenEnvOptions(url=url, resets=[{}]))
        await made.reset({}, 0)
        thread.join()


@pytest.fixture
def all_reachable() -> Iterator[None]:
    set_reachable_hosts("*")
    yield
    set_reachable_hosts("")


@pytest.mark.parametrize("status", [b"301 Moved Permanently", b"302 Found", b"303 See Other", b"307 Temporary Redirect",
                                    b"308 Permanent Redirect"])  # fmt: skip
async def test_no_redirect_is_followed(
    status: bytes, trickle: Callable[[bytes, bytes], str], inside: tuple[str, list[str]], all_reachable: None
) -> None:
    """Not to another address of the service's network, and not to one that the administrator allows either."""
    target, reached = inside
    answer = b"HTTP/1.1 " + status + b"\r\nLocation: " + target.encode() + b"\r\nContent-Length: 0\r\n\r\n"
    for body in (None, {"a": 1}):
        with pytest.raises(UserError, match=f"answers {status[:3].decode()}"):
            request_json(trickle(answer, b""), "x", body)
    with pytest.raises(openenv.SessionLost, match="opens no session"):
        await open_session(answer)
    assert not reached


def sink(kind: str, allowed: str = "") -> Callable[[str], Any]:
    """The request of a sink of this kind, where the administrator has ``allowed`` these hosts."""
    settings = Settings.load({}, reachable_hosts=allowed)
    return lambda url: Endpoint(SinkSpec.model_validate({"kind": kind, "url": url}), "x", settings).ask("a", {})


def judge(url: str) -> Any:
    """A question to a judge, which only the administrator names."""
    return ask_named(NamedJudge(url, "m"), "x", {"messages": []})


def schema(url: str) -> Any:
    """The first request to an OpenEnv server."""
    return openenv.OpenEnv(openenv.OpenEnvOptions(url=url, resets=[{}]))


SINKS = ["mlflow", "trackio", "wandb"]
ANY = {"judge": judge} | {kind: sink(kind, "*") for kind in SINKS}
STRANGERS = {"request": lambda url: request_json(url, "x"), "openenv": schema} | {kind: sink(kind) for kind in SINKS}
"""By user: a request to an address that a job gives."""


@pytest.mark.parametrize("ask", ANY.values(), ids=ANY)
def test_no_user_follows_a_redirect(
    ask: Callable[[str], Any], trickle: Callable[[bytes, bytes], str], inside: tuple[str, list[str]]
) -> None:
    target, reached = inside
    answer = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: " + target.encode() + b"\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(UserError, match="answers 307"):
        ask(trickle(answer, b"").removesuffix("/schema"))
    assert not reached


@pytest.fixture
def rebinding(
    trickle: Callable[[bytes, bytes], str], inside: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[str]]:
    """The address of a name whose name server answers each second question with an address of the service's network,
    and the names that were looked up. It answers the schema of an OpenEnv server."""
    first = urlsplit(trickle(HEAD + b'Content-Length: 14\r\n\r\n{"action": {}}', b"")).port
    asked: list[str] = []

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        public = len(asked) % 2 == 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14" if public else "127.0.0.1", port))]

    def create_connection(address: tuple[str, int], *_: Any, **__: Any) -> socket.socket:
        """The public internet is a server of this test."""
        assert address[0] == "93.184.215.14", address
        made = socket.socket()
        made.connect(("127.0.0.1", first))
        return made

    monkeypatch.setattr(network.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(outbound.socket, "create_connection", create_connection)
    return f"http://rebinding.example:{urlsplit(inside[0]).port}", asked


@pytest.mark.parametrize("ask", STRANGERS.values(), ids=STRANGERS)
def test_a_name_is_looked_up_once_and_the_judged_address_is_connected_to(
    ask: Callable[[str], Any], rebinding: tuple[str, list[str]], inside: tuple[str, list[str]]
) -> None:
    """A name server that answers the second question with an address of the service's network changes nothing."""
    url, asked = rebinding
    ask(url)
    assert asked == ["rebinding.example"]
    with pytest.raises(UserError, match="which is not an address of the public internet"):
        ask(url)
    assert not inside[1]


async def test_a_session_is_judged_like_the_request_before_it(
    rebinding: tuple[str, list[str]], inside: tuple[str, list[str]]
) -> None:
    made = await asyncio.to_thread(schema, rebinding[0])
    with pytest.raises(UserError, match="which is not an address of the public internet"):
        await made.reset({}, 0)
    assert not inside[1]


def test_a_child_that_never_answers_is_ended() -> None:
    # it shows a prompt without a line's end
    silent = pool.VerifierPool("silent", limit=0.01, module="asyncio", wall_seconds=0.3)
    take_child_seconds()
    with pytest.raises(RuntimeError, match=r"gave no answer within 0.35 s"):
        silent.score({})
    assert take_child_seconds() == 0.01, "it is charged, with no more than it may take"
    silent.close()
