"""A hub that is silent, or sends a few bytes at a time, is given up within seconds, wherever in a download that is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rookery.worker.model.hub import PROGRESS_BYTES, AnswerWatch

INFO = (
    b'{"id":"a/b","sha":"0123456789012345678901234567890123456789","siblings":[{"rfilename":"config.json"},'
    b'{"rfilename":"model.safetensors"}]}'
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
FILE = HEAD + b'1000000\r\nETag: "a"\r\nX-Repo-Commit: 0123456789012345678901234567890123456789\r\n\r\n'

TRICKLES = {
    "silent": [b""],
    "silent after the description": [INFO, b""],
    "the head of the description": [b"HTTP/1.1 200 OK\r\nX-Long: "],
    "the description": [HEAD + b"1000000\r\n\r\n"],
    "the head of a file": [INFO, b"HTTP/1.1 200 OK\r\nX-Long: "],
    "a file": [INFO, FILE],
}
"""By the part of a download that never ends: the answers of a hub to its first requests, of which the last one goes on
with a byte at a time, and not at all where it is empty. A description is whole."""


@contextmanager
def endless_hub(answers: list[bytes]) -> Iterator[str]:
    """A server that gives these answers, the last one to all further requests."""
    held: list[socket.socket] = []
    ended = threading.Event()

    def answer(connection: socket.socket, text: bytes) -> None:
        with suppress(OSError):
            asked = connection.recv(1 << 16)
            if text == INFO:
                connection.sendall(HEAD + str(len(INFO)).encode() + b"\r\n\r\n" + INFO)
                connection.close()
                return
            connection.sendall(text)
            if asked.startswith(b"HEAD") and text == FILE:
                connection.close()
                return
            while text and not ended.wait(0.05):
                connection.sendall(b"x")

    def serve() -> None:
        left = [*answers]
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                held.append(connection)
                text = left.pop(0) if len(left) > 1 else left[0]
                threading.Thread(target=answer, args=(connection, text), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    ended.set()
    for connection in held:
        with suppress(OSError):
            connection.close()


PROGRAM = """
import sys
from rookery.worker.model.hub import bounded_requests
with bounded_requests(0.5):
    from huggingface_hub import snapshot_download
    try:
        snapshot_download("a/b", cache_dir=sys.argv[1])
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("answers", TRICKLES.values(), ids=TRICKLES)
def test_a_hub_without_progress_is_given_up(tmp_path: Path, answers: list[bytes]) -> None:
    with endless_hub(answers) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=240
        )  # without limits it never ends
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_only_an_answer_without_progress_loses_its_connection() -> None:
    now = [0.0]
    here, there = socket.socketpair()
    with closing(here), closing(there):
        there.settimeout(0.0)
        watch = AnswerWatch(20.0, lambda: now[0])
        response = SimpleNamespace(request="GET", num_bytes_downloaded=0)
        stream = SimpleNamespace(get_extra_info={"socket": here}.get)

        def ended() -> bool:
            """The other end of the connection reads its end."""
            watch.look()
            with suppress(BlockingIOError):
                return there.recv(1) == b""
            return False

        watch.traced("GET", "connection.connect_tcp.complete", {"return_value": stream})
        watch.traced("GET", "connection.start_tls.complete", {"return_value": stream})
        now[0] = 19.0
        assert not ended()
        watch.answered(response)
        for _ in range(10):  # slow, and as long as it takes
            now[0] += 19.0
            response.num_bytes_downloaded += PROGRESS_BYTES
            assert not ended()
        now[0] += 19.0
        response.num_bytes_downloaded += PROGRESS_BYTES - 1
        assert not ended() and not watch.gave_up
        now[0] += 2.0
        assert ended() and watch.gave_up


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("proxy.start_tls.complete", "http11.response_closed.complete"),
        ("connection.connect_tcp.complete", "connection.start_tls.failed"),
    ],
)
def test_a_request_that_has_ended_is_not_looked_at(begin: str, end: str) -> None:
    now = [0.0]
    here, there = socket.socketpair()
    with closing(here), closing(there):
        watch = AnswerWatch(20.0, lambda: now[0])
        stream = SimpleNamespace(get_extra_info={"socket": here}.get)
        watch.traced("GET", begin, {"return_value": stream})
        watch.traced("GET", end, {"return_value": None})
        now[0] = 100.0
        watch.look()
        here.sendall(b"x")
        assert there.recv(1) == b"x" and not watch.gave_up
