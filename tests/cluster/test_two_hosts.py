"""A Ray cluster over two hosts, started by the commands of ``deploy/raycluster.yaml`` (``make test-ray``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support import netns, waiting
from tests.support.clusters import job_of_texts
from tests.support.small_model import save_small_model

from rookery.cluster.ray import address_for_nodes
from rookery.errors import UserError
from rookery.settings import Settings

until = partial(waiting.until, patience=180.0)
"""Ray starts twice here, and a whole command runs for each look."""

STEPS = 10
MANIFEST = Path(__file__).parents[2] / "deploy" / "raycluster.yaml"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("given", "connect", "nodes", "address"),
    [
        ({"host": "0.0.0.0"}, "http://127.0.0.1:7077", ["10.0.0.1", "10.0.0.2"], "http://10.0.0.1:7077"),
        ({"host": "0.0.0.0"}, "https://127.0.0.1:7077", ["10.0.0.1"], "https://10.0.0.1:7077"),
        ({"host": "10.0.0.1"}, "http://10.0.0.1:7077", ["10.0.0.1", "10.0.0.2"], "http://10.0.0.1:7077"),
        ({"host": "127.0.0.1"}, "http://127.0.0.1:7077", ["10.0.0.1"], "http://127.0.0.1:7077"),
        ({"url": "https://rookery.example.org/"}, "http://127.0.0.1:7", ["10.0.0.2"], "https://rookery.example.org"),
        ({"host": "127.0.0.1"}, "http://127.0.0.1:7077", ["10.0.0.1", "10.0.0.2"], None),
        ({"host": "localhost"}, "http://localhost:7077", ["10.0.0.2"], None),
        ({"url": "http://localhost:7077"}, "http://127.0.0.1:7077", ["10.0.0.1", "10.0.0.2"], None),
        ({"url": "http://[::1]:7077"}, "http://127.0.0.1:7077", ["10.0.0.2"], None),
        ({"url": "http://localhost:7077"}, "http://127.0.0.1:7077", ["10.0.0.1"], "http://localhost:7077"),
        (
            {"host": "10.0.0.1", "url": "http://localhost:7077"},
            "http://10.0.0.1:7077",
            ["10.0.0.2"],
            "http://10.0.0.1:7077",
        ),
        (
            {"host": "0.0.0.0", "url": "http://localhost:7077"},
            "http://127.0.0.1:7077",
            ["10.0.0.1", "10.0.0.2"],
            "http://10.0.0.1:7077",
        ),
    ],
)
def test_nodes_get_an_address_that_they_reach(
    given: dict[str, str], connect: str, nodes: list[str], address: str | None
) -> None:
    settings = Settings.load({}, **given)
    if address is not None:
        assert address_for_nodes(settings, connect, "10.0.0.1", nodes) == address
    else:
        with pytest.raises(UserError, match=r"nodes at 10\.0\.0\.2, which do not reach .*--host 0\.0\.0\.0"):
            address_for_nodes(settings, connect, "10.0.0.1", nodes)


def test_ipv6_address_of_a_node_is_bracketed() -> None:
    settings = Settings.load({}, host="::")
    assert address_for_nodes(settings, "http://[::1]:7077", "fd00::1", []) == "http://[fd00::1]:7077"


class TwoHosts:
    """The head's container on one host and the spot group's on the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        spec = next(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))["spec"]
        self._head, (self._spot,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
        self.one, self.two = netns.two_hosts(folder / "hosts")
        self.model = str(save_small_model(folder / "model"))

    def environment(self, group: dict[str, Any]) -> dict[str, str]:
        """As the manifest's container has it, with the files of this test."""
        (container,) = group["template"]["spec"]["containers"]
        given = {entry["name"]: entry.get("value", "0123456789abcdef" * 2) for entry in container["env"]}
        return {
            "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(self.folder), "PYTHONPATH": os.pathsep.join(sys.path),
            "ROOKERY_CACHE": str(self.folder / "cache"), "ROOKERY_MODELS": self.model,
            "RAY_ADDRESS": f"{self.one.address}:6379",  # as KubeRay sets it
            "RAY_USAGE_STATS_ENABLED": "0", **given,
        }  # fmt: skip

    def start_head(self) -> None:
        parameters = [f"--{name}={value}" for name, value in self._head["rayStartParams"].items()]
        start = ["ray", "start", "--head", "--block", f"--node-ip-address={self.one.address}", "--num-cpus=4"]
        environment = self.environment(self._head)
        self.one.start([*start, *parameters], environment, self.folder / "head.log")
        (container,) = self._head["template"]["spec"]["containers"]
        shell, flag, script = container["lifecycle"]["postStart"]["exec"]["command"]
        script = script.replace("/data", str(self.folder / "data")).replace(
            "/proc/1/fd/1", str(self.folder / "serve.log")
        )
        self.one.start([shell, flag, script], environment, self.folder / "post-start.log")

    def start_spot(self) -> None:
        labels = ",".join(f"{name}={value}" for name, value in self._spot["labels"].items())
        start = ["ray", "start", "--block", f"--address={self.one.address}:6379", "--num-cpus=8"]
        arguments = [*start, f"--node-ip-address={self.two.address}", f"--labels={labels}"]
        self.two.start(arguments, self.environment(self._spot), self.folder / "spot.log")

    def rookery(self, *arguments: str) -> str:
        environment = {**self.environment(self._head), "ROOKERY_DATA": str(self.folder / "data")}
        return self.one.output([str(BIN / "rookery"), *arguments], environment)

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """The JSON that a command prints: one document or one line for each row."""
        text = self.rookery(*arguments, "--json")
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = [json.loads(line) for line in text.splitlines()]
        return found if isinstance(found, list) else [found]

    def serving(self, kind: str) -> list[dict[str, Any]]:
        if not (self.folder / "data" / "admin.key").exists():
            return []
        try:
            rows = json.loads(self.rookery("workers", "--json"))["workers"]
        except Exception as error:  # the service is not up yet
            print(error)
            return []
        return [row for row in rows if row["state"] == "serving" and row["kind"] == kind]

    def logs(self) -> str:
        names = ["head.log", "spot.log", "serve.log", "post-start.log"]
        paths = [self.folder / name for name in names] + sorted((self.folder / "data" / "logs").glob("*.log"))
        ends = {path.name: path.read_text(errors="replace")[-2000:] for path in paths if path.exists()}
        return "\n".join(f"--- {name}\n{end}" for name, end in ends.items())

    def close(self) -> None:
        self.two.remove()
        self.one.remove()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'rookery[ray]'")
    if reason := netns.missing():
        pytest.skip(reason)
    pair = TwoHosts(tmp_path)
    try:
        yield pair
    finally:
        print(pair.logs())
        pair.close()


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_job_outlives_the_loss_of_a_host(hosts: TwoHosts) -> None:
    """The other host's workers dial the head's address, take part in the job, and vanish with their host. A host that
    comes back serves again."""
    hosts.start_head()
    until(lambda: hosts.serving("reserved"), "no reserved worker on the head")
    hosts.start_spot()
    spot = until(lambda: hosts.serving("preemptible"), "no worker on the second host")
    assert all(hosts.two.address in worker["name"] for worker in spot)

    path = hosts.folder / "job.json"
    path.write_text(json.dumps(job_of_texts(hosts.model, STEPS)))
    hosts.rookery("run", str(path), "--detach")
    until(lambda: any(worker["requests"] for worker in hosts.serving("preemptible")), "the second host gets no request")
    hosts.two.kill()

    def ended() -> bool:
        (row,) = hosts.rows("jobs", "list")
        assert row["state"] in ("running", "completed"), row
        return bool(row["state"] == "completed")

    until(ended, "the job does not end without the second host")
    hosts.two.restore()
    hosts.start_spot()
    until(lambda: hosts.serving("preemptible"), "no worker returns with the second host")
