"""A hub that is silent is given up within seconds, wherever in a download it falls silent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

INFO = (
    b'{"id":"a/b","sha":"0123456789012345678901234567890123456789","siblings":[{"rfilename":"config.json"},'
    b'{"rfilename":"model.safetensors"}]}'
)


@contextmanager
def silent_hub(answers: int) -> Iterator[str]:
    """A server that answers its first ``answers`` requests with a repository's description, and no other one."""
    held: list[socket.socket] = []

    def serve() -> None:
        left = answers
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            held.append(connection)
            if left > 0 and connection.recv(1 << 16):
                left -= 1
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
                connection.sendall(head + str(len(INFO)).encode() + b"\r\n\r\n" + INFO)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    for connection in held:
        with suppress(OSError):
            connection.close()


PROGRAM = """
import sys
from rookery.worker.model.hub import bound_requests
bound_requests(0.5)
from huggingface_hub import snapshot_download
try:
    snapshot_download("a/b", cache_dir=sys.argv[1])
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("answers", [0, 1])
def test_silent_hub_is_given_up(tmp_path: Path, answers: int) -> None:
    began = time.monotonic()
    with silent_hub(answers) as address:
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    assert time.monotonic() - began < 40  # most of it is the start of the library here; without limits it never ends
