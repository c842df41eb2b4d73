"""Tinker calls on a tiny model, one to eight clients at once: Rookery beside the nearest open server, SkyRL's.

Same machine, same model folder, same client program; contenders take turns within one run. Where SkyRL is measured,
both are met by the newest SDK that it understands (requests in JSON), Rookery by the newest SDK too. A pair is one
forward_backward of 8 texts of 32 tokens and the optimizer step on it, sent together and waited for; Rookery's step is
durable when it is answered. A sample is one text of 16 tokens. All are warm: nothing is compiled or loaded while time
is taken.

    make bench-tinker, or python -m benchmarks.micro.tinker_latency [--repeats N] [--clients 1 2 4 8]"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from benchmarks.lib.contender import Contender, ContenderFailed
from benchmarks.lib.harness import HERE, WORK, Result, command, peer_python
from benchmarks.lib.tinkering import tinkering
from tests.support.small_model import save_small_model

SHARED_SDK = "0.24.1"
"""The newest SDK that sends what SkyRL reads (version 0.3.0 in peers/skyrl.txt): later ones send protobuf alone."""

CALLS = 20
"""Of each kind, per client and repeat."""

THREADS = 1
"""Of Rookery's worker: products this small are slower on two. JAX, beside it, chooses for each by itself."""

START_SECONDS = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    asked = parser.parse_args()
    result = Result("tinker_latency", "Tinker calls on a tiny model, by clients at once", command())
    with tempfile.TemporaryDirectory() as folder:
        model = str(save_small_model(Path(folder) / "model"))
        with tinkering(models=model, threads=THREADS) as service:
            address = (f"{service.url}/tinker", service.key, model)
            contenders = {"Rookery": Contender("newest", program(*address))}
            result.versions["tinker"] = str(contenders["Rookery"].about["sdk"])
            try:
                with skyrl(model, Path(folder)) as url:
                    shared = {"PYTHONPATH": os.pathsep.join([str(sdk()), os.environ.get("PYTHONPATH", "")])}
                    contenders["Rookery, older SDK"] = Contender("older", program(*address), shared)
                    contenders["SkyRL"] = Contender("skyrl", program(url, "tml-none", model), shared)
                    result.versions["older tinker"] = SHARED_SDK
                    measure(result, contenders, asked.clients, asked.repeats)
            except ContenderFailed as error:
                result.notes.append(f"SkyRL was not measured: {error}")
                print(result.notes[-1], flush=True)
                contenders = {"Rookery": contenders["Rookery"]}
                measure(result, contenders, asked.clients, asked.repeats)
            for contender in contenders.values():
                contender.close()
    result.save()
    sys.stdout.flush()
    os._exit(0)


def measure(result: Result, contenders: dict[str, Contender], counts: list[int], repeats: int) -> None:
    """All contenders in turn, every repeat of every number of clients."""
    for count in counts:
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(repeats):
            for name, contender in contenders.items():
                answer = contender.run(count=count, calls=CALLS)
                for what in ("pair", "sample"):
                    found.setdefault((what, name), []).append(1000 * statistics.median(answer[what]))
        for what, label in (("pair", "forward_backward + optim_step"), ("sample", "sample of 16 tokens")):
            rows = {
                name: result.add(
                    f"{label}, {count} clients, {name}", found[what, name], "ms", f"median of {count * CALLS}"
                )
                for name in contenders
            }
            if "SkyRL" in rows:
                ours, theirs = rows["Rookery, older SDK"].median, rows["SkyRL"].median
                result.judge(
                    f"{label}, {count} clients: faster than SkyRL", f"{theirs / ours:.1f} times", ours < theirs
                )


def program(url: str, key: str, model: str) -> list[str]:
    return [sys.executable, str(HERE / "peers" / "tinker_client.py"), url, key, model]


def sdk() -> Path:
    folder = WORK / f"tinker-{SHARED_SDK}"
    if not folder.exists():
        raise ContenderFailed(f"SDK {SHARED_SDK} is missing: make bench-tinker")
    return folder


@contextlib.contextmanager
def skyrl(model: str, folder: Path) -> Iterator[str]:
    """SkyRL's server; yields its address once it answers. Raises :class:`ContenderFailed` where it does not run."""
    python = peer_python("skyrl")
    if python is None:
        raise ContenderFailed("its environment is missing: make bench-tinker")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    said = folder / "skyrl.log"
    with said.open("wb") as log:
        server = subprocess.Popen(
            [str(python), str(HERE / "peers" / "skyrl_server.py"), str(port), model, str(folder)],
            stdout=log, stderr=log, env={**os.environ, "JAX_PLATFORMS": "cpu"}, start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        await_answer(url, server, said)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(server.pid, signal.SIGTERM)  # its engine is a process of its own
        server.wait(30)


def await_answer(url: str, server: subprocess.Popen[bytes], said: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            lines = said.read_text(errors="replace").strip().splitlines()
            raise ContenderFailed(f"its server ended: {lines[-1][:300] if lines else server.returncode}")
        try:
            if httpx.get(f"{url}/api/v1/healthz", timeout=5).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise ContenderFailed(f"its server did not answer within {START_SECONDS:.0f} s")


if __name__ == "__main__":
    main()
