"""``kill -9`` of source, receiver and service, and a site that vanishes, in the middle of transfers between processes
in network namespaces with limited links: the scenes of ``benchmarks.scale.weights``, with a small artifact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.lib.harness import Result
from benchmarks.scale.weights import Bench, kills, names, vanishing

ROOT = Path(__file__).parents[3]
SIZE, RATE = 4_000_000, 20.0
"""Bytes, and Mbit/s of each uplink: a copy takes 1.6 s."""

NAMESPACE = ["unshare", "-Urn"]


def possible() -> bool:
    """Whether this machine has network namespaces for users, and bridges with limited links in them."""
    try:
        links = "ip link add br0 type bridge && ip link add ve0 type veth peer name ve1"
        script = f"{links} && tc qdisc add dev ve0 root tbf rate 1mbit burst 9kb latency 9ms"
        return subprocess.run([*NAMESPACE, "sh", "-c", script], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.skipif(not possible(), reason="network namespaces of users, ip and tc are needed")
@pytest.mark.parametrize("scene", ["kills", "vanishing"])
def test_every_byte_is_right_after(scene: str, tmp_path: Path) -> None:
    command = [*NAMESPACE, sys.executable, "-m", "tests.worker.transfer.test_killed", scene, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def play(scene: str, folder: Path) -> None:
    """In a namespace. Bytes are checked within the scenes; their time is no matter of a test."""
    result = Result("weights", "a small artifact", "")
    if scene == "vanishing":
        vanishing(result, folder, SIZE, RATE)
    else:
        bench = Bench(folder, RATE)
        try:
            bench.store(SIZE)
            bench.serve()
            for name in ("trainer", *names(4, 1)):
                bench.node(name, 0)
            kills(result, bench, SIZE, SIZE * 8 / (RATE * 1e6))
        finally:
            bench.close()
        assert result.verdicts and all(verdict.met for verdict in result.verdicts)


if __name__ == "__main__":
    play(sys.argv[1], Path(sys.argv[2]))
