"""Workers of one base model as Ray actors: ``python -m rookery.cluster.ray --connect URL --model NAME``. Without a
model, the host of the built-in environments.

Promises:

* Ray places, restarts and collects logs; the workers connect to the service by themselves, and the service notices a
  lost one by its own heartbeats.
* Reserved workers (``workers``) lie in a placement group on nodes without ``ray_spot_label``, spread over them;
  preemptible ones (``ray_spot_workers``) on nodes with it. One that has no node waits, and starts when a node joins.
* Ray's autoscaler is asked for nodes for all wanted workers (:func:`scale_to`), also while they start again: it removes
  no node that a worker is about to return to. The request ends with this process.
* A worker that refuses to start, such as on a node with too little memory, ends no other one. It is started again when
  a node joins. This process ends with the reason when all reserved workers, or all where none is reserved, have refused
  or end again and again in the same way.
* A worker has a separate GPU where a node of its kind was ever seen with one, also while that node is away: it waits
  for a node rather than share a GPU. Workers that were started before, without one, move to such nodes, also to one
  whose CPUs they themselves hold.
* A node that Ray drains, because its machine is about to be taken away, has its workers drained by SIGTERM.
* The process is a separate Ray driver, because Ray ends a driver that has lost the head: the service lives on, starts
  this process again and again, and the workers return with the head. The actors end with it, their processes with
  them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from rookery.aio import Signal, on_end_signals, wait_event
from rookery.children import child_variables, die_with_parent, interpreter
from rookery.cluster.base import DRAINS, SCALED, child_environment, environment_host, file_name, preloaded
from rookery.cluster.supervisor import NODE_LOST, Child, Process, Supervisor
from rookery.errors import EXIT_REFUSED, Unavailable, UserError, installs, to_stderr
from rookery.network import DEFAULT_PORTS, dialled_host, is_loopback, join_address, service_url
from rookery.settings import Settings, token_of

LOST = 1
"""Exit code of a worker whose actor was lost, and of this process without the service or the head."""
NODE = "{node}"
"""In a worker's name: its node's address and its actor's id."""
LOG_LINES = 20
"""Last lines of a worker's output that its node reports when it has ended; Ray has the whole log."""
DRAIN_LOOK_SECONDS = 1.0
"""Interval at which Ray is asked for draining nodes: it sends no event, and a spot notice leaves 30 s or more."""
LOOKS = 60
"""Looks in a row to which the head gives no answer, after which this process ends: one that keeps its state elsewhere
returns within a minute."""
SCALE_SECONDS = 20.0
"""Interval at which a request to Ray's autoscaler is repeated, and learns of those of other base models."""
FORGOTTEN_SECONDS = 3 * SCALE_SECONDS
"""A request that was not repeated for so long is of a process that was killed. Each process watches the others' by the
monotonic clock: clocks of machines need not agree."""
PLACED = ("CREATED", "RESCHEDULING")
"""States of a placement group that has its nodes; in the second, some that it had are lost."""
START_SECONDS = 60.0
"""A worker that has waited this long for a node is reported in the log, each time again. It keeps waiting."""

END_SECONDS = 2.0
"""Without the service, Ray has so long to take the end of the request: a worker's process ends with this one."""
REQUESTS = b"rookery-workers/"
"""Prefix of the keys in Ray's store under which the processes of the base models leave their requests: Ray knows one
request per cluster."""
HEAD_PORT = 6379
"""Default address of a head."""
CONNECT_SECONDS = 5.0
"""Longest wait for the head to accept a connection and for its answer. Ray itself would try for minutes."""
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
"""Begins a gRPC connection: HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
SETTINGS_FRAME = b"\4"
"""Type of the first frame that a gRPC server sends."""


class ProcessActor:
    """The actor: it runs one process on its node, which ends with it."""

    def __init__(self, arguments: list[str], environment: dict[str, str], allocator: str) -> None:
        self._arguments = arguments
        self._environment = environment
        self._allocator = allocator

    def start(self) -> tuple[str, int]:
        """The node's id, and the process's id there."""
        import ray

        context = ray.get_runtime_context()
        node = f"{ray.util.get_node_ip_address()}/{context.get_actor_id()[:8]}"
        self._process = subprocess.Popen(
            interpreter(*[text.replace(NODE, node) for text in self._arguments]),
            stdin=subprocess.PIPE,  # never written to: it closes when this actor ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=child_variables(preloaded({**os.environ, **self._environment}, self._allocator)),
            encoding="utf-8",
            errors="replace",
        )
        return context.get_node_id(), self._process.pid

    def wait(self) -> tuple[int, str]:
        """The exit code of the process, and the last lines of its output."""
        lines: deque[str] = deque(maxlen=LOG_LINES)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(line, end="", flush=True)  # into Ray's log of this actor
            lines.append(line)
        return self._process.wait(), "".join(lines)

    def terminate(self) -> None:
        self._process.terminate()


class RayProcess:
    """A worker process on some node, as a :class:`~rookery.cluster.supervisor.Supervisor` wants it."""

    def __init__(self, actor: Any, node: str, pid: int, path: Path, child: Child, gpus: float, group: Any) -> None:
        """``gpus`` are reserved for it, in the placement group ``group`` or in none."""
        self._actor = actor
        self._path = path
        self.child, self.gpus, self.group = child, gpus, group
        self.drains = False
        self.node = node
        self.pid = pid

    async def wait(self) -> int:
        import ray

        try:
            code, output = await self._actor.wait.remote()
        except ray.exceptions.RayActorError as error:
            alive = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
            code = LOST if self.node in alive else NODE_LOST
            output = f"its {'actor' if code == LOST else 'node'} was lost: {first_line(error)}\n"
        with self._path.open("a", encoding="utf-8") as log:
            log.write(output)
        ray.kill(self._actor)
        return int(code)

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        import ray

        ray.kill(self._actor)


class RayActors:
    """Processes on Ray's nodes, each in an actor with a separate placement."""

    def __init__(
        self,
        settings: Settings,
        reserved: list[Child],
        spot: list[Child],
        hosts: list[Child],
        check: Callable[[Collection[str]], object],
        more: Callable[[int], Child] | None = None,
        count: Callable[[], int] = lambda: 0,
        look_seconds: float = DRAIN_LOOK_SECONDS,
    ) -> None:
        """``count()`` is the present number of ``more`` preemptible workers, each made from its number. ``reserved``
        are placed together and spread; ``spot`` wait for nodes that may vanish; ``hosts`` need no CPU
        of their own. ``check`` raises UserError where the service cannot be reached from nodes of these addresses."""
        self._check = check
        self._look_seconds = look_seconds
        self._settings = settings.cluster
        self._allocator = settings.worker.allocator
        self._label, self._value = settings.cluster.ray_spot_label.split("=")
        self._reserved = {child: i for i, child in enumerate(reserved)}
        self._hosts = hosts
        self._gpus = dict.fromkeys((False, True), 0.0 if self._settings.ray_gpus == "auto" else self._settings.ray_gpus)
        """GPUs of a worker, by whether it is preemptible: the most that any look at the nodes has found."""
        self._group: Any = None
        """The placement group of the reserved workers. Each has :attr:`_group_gpus` there."""
        self._group_gpus = 0.0
        self._larger: Any = None
        """The group that replaces it as soon as it has its nodes: nodes with GPUs have joined."""
        self._replaced: dict[Any, float] = {}
        """The earlier groups that are not yet removed, and when each is at the latest (monotonic seconds)."""
        self._switched = Signal()
        """The reserved workers have another group."""
        self._drain_seconds = DRAINS * settings.worker.drain_seconds
        self._spot = len(spot)
        self._needed = reserved or [*spot, *hosts]
        """Without one of them the others are of no use."""
        self._nodes: set[str] = set()
        """Ids of the nodes at the last look."""
        self._more, self._count = more, count
        self._elastic: list[Child] = []
        """Preemptible workers in addition to the configured ones."""
        self._scaled = 0.0
        """When Ray's autoscaler was asked last."""
        self.stopped = asyncio.Event()
        self._processes: WeakSet[RayProcess] = WeakSet()
        """The workers that the supervisor holds."""
        children, logs = [*reserved, *spot, *hosts], settings.data / "logs"
        # The service waits for this process as long as the setting says: its workers get half of that.
        self.supervisor = Supervisor(children, logs, settings.server.stop_seconds / 2, self._spawn,
                                     remove_seconds=self._drain_seconds)  # fmt: skip

    async def run(self) -> str:
        """Keep the processes alive until :attr:`stopped`. Returns why those that are needed do not work, or an empty
        text. Raises UserError as ``check`` does, and the error of a head that is away for long."""
        import ray

        self.look(await asyncio.to_thread(ray.nodes))
        if self._reserved:
            self._group, self._group_gpus = await asyncio.to_thread(self._new_group), self._gpus[False]
        await self.supervisor.start()
        missed = 0
        try:
            while not await wait_event(self.stopped, self._look_seconds):
                if self._needed and all(child.failure for child in self._needed):
                    return self._needed[0].failure
                try:
                    await self._follow()
                    missed = 0
                except UserError:
                    raise
                except Exception as error:  # no answer of the head: the workers live on
                    missed += 1
                    print(f"the head does not answer: {type(error).__name__}: {first_line(error)}", flush=True)
                    if missed == LOOKS:
                        raise
            return ""
        finally:
            self.stopped.set()
            await self.supervisor.stop()
            await asyncio.to_thread(scale_to, [])
            for group in (self._group, self._larger, *self._replaced):
                if group is not None:
                    await asyncio.to_thread(_remove_group, group)

    async def _follow(self) -> None:
        """Look at the nodes, and do what their changes ask for."""
        import ray

        draining = await asyncio.to_thread(draining_nodes)
        found = await asyncio.to_thread(ray.nodes)
        self._check(addresses(found))  # one may have joined
        nodes = {node["NodeID"] for node in found if node["Alive"]}
        if self._nodes and nodes - self._nodes:
            self.supervisor.retry(self.supervisor.children)
        self._nodes = nodes
        self.look(found)
        self.resize()
        await self._scale()
        await self._remove_replaced()
        await self._regroup([node for node in found if node["NodeID"] not in draining])
        moving = self._moving(found)
        for process in [*self._processes]:
            if not process.drains and (process in moving or process.node in draining):
                process.drains = True
                process.terminate()

    def _new_group(self) -> Any:
        from ray.util.placement_group import placement_group

        bundles, selectors = self.bundles(spot=False)
        return placement_group(bundles, strategy="SPREAD", bundle_label_selector=selectors)

    def _moving(self, nodes: list[dict[str, Any]]) -> set[RayProcess]:
        """The processes that start again with a GPU, for which nodes have joined since they started: reserved ones of
        an earlier group, preemptible ones on a node with GPUs, where they would share the first."""
        having = {node["NodeID"] for node in self._candidates(nodes, spot=True) if _has_gpu(node)}
        return {
            one for one in self._processes
            if (one.group is not self._group if one.child in self._reserved
                else one.node in having and one.gpus < self._gpus[True])
        }  # fmt: skip

    async def _regroup(self, nodes: list[dict[str, Any]]) -> None:
        """Give the reserved workers a group with GPUs, for which ``nodes`` have joined. They keep the present one until
        the other has its nodes, or would have them if the present one were removed: it may hold the CPUs that are next
        to the GPUs. One that has no nodes yet would take those CPUs, and is replaced at once."""
        import ray
        from ray.util.placement_group import placement_group_table

        if not self._reserved or self._group_gpus == self._gpus[False]:
            return
        if self._larger is None:
            self._larger = await asyncio.to_thread(self._new_group)
        present, larger = [await asyncio.to_thread(placement_group_table, one) for one in (self._group, self._larger)]
        if present.get("state") in PLACED and larger.get("state") not in PLACED:
            found = await asyncio.to_thread(ray._private.state.available_resources_per_node)
            free = {node["NodeID"]: found.get(node["NodeID"], {}) for node in self._candidates(nodes, spot=False)}
            if not is_in_the_way(list(present["bundles_to_node_id"].values()), self._bundle(self._group_gpus),
                                 self._bundle(self._gpus[False]), free):  # fmt: skip
                return
        self._replaced[self._group] = time.monotonic() + self._drain_seconds
        self._group, self._group_gpus, self._larger = self._larger, self._gpus[False], None
        self._switched.notify()

    async def _remove_replaced(self) -> None:
        """Remove the earlier groups in which no worker runs any more, or has for long."""
        for group, latest in [*self._replaced.items()]:
            if time.monotonic() > latest or all(process.group is not group for process in self._processes):
                await asyncio.to_thread(_remove_group, group)
                del self._replaced[group]

    def resize(self) -> None:
        """Start or end preemptible workers, so that there are as many in addition as are wanted now. Ray's autoscaler
        is asked at once."""
        wanted = self._count()
        if self._more is None or wanted == len(self._elastic):
            return
        if wanted < len(self._elastic):
            self.supervisor.remove(self._elastic[wanted:])
            del self._elastic[wanted:]
        else:
            new = [self._more(number) for number in range(len(self._elastic) + 1, wanted + 1)]
            self._elastic += new
            self.supervisor.add(new)
        self._scaled = 0.0

    async def _scale(self) -> None:
        """Ask Ray's autoscaler for nodes for all workers, now and then again."""
        if not self._hosts and time.monotonic() - self._scaled > SCALE_SECONDS:
            self._scaled = time.monotonic()
            wanted = [self.bundles(spot=spot) for spot in (False, True)]
            await asyncio.to_thread(scale_to, [one for pair in wanted for one in zip(*pair, strict=True)])

    def bundles(self, *, spot: bool) -> tuple[list[dict[str, float]], list[dict[str, str]]]:
        """The resources of each preemptible worker, or of each reserved one, and the labels of its node."""
        count = self._spot + len(self._elastic) if spot else len(self._reserved)
        label = self._value if spot else f"!{self._value}"
        return [self._bundle(self._gpus[spot])] * count, [{self._label: label}] * count

    def _bundle(self, gpus: float) -> dict[str, float]:
        """The resources of a worker with so many GPUs."""
        resources = {"CPU": self._settings.ray_cpus, "GPU": gpus}
        return {kind: amount for kind, amount in resources.items() if amount}

    def look(self, nodes: list[dict[str, Any]]) -> None:
        """Learn from Ray's ``nodes`` whether workers get GPUs. Nothing is forgotten: a node that is away returns, and
        workers that share a GPU refuse for memory, or fail."""
        if self._settings.ray_gpus != "auto":
            return
        for spot in (False, True):
            if any(map(_has_gpu, self._candidates(nodes, spot=spot))):
                self._gpus[spot] = 1.0

    def _candidates(self, nodes: list[dict[str, Any]], *, spot: bool) -> list[dict[str, Any]]:
        """The nodes that may run preemptible workers, or reserved ones."""
        return [node for node in nodes if node["Alive"] and (node["Labels"].get(self._label) == self._value) == spot]

    def options(self, child: Child) -> dict[str, Any]:
        """Where the actor of ``child`` may run, and what it needs there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpus = self._settings.ray_cpus
        if child in self._hosts:
            return {"num_cpus": 0, "num_gpus": 0.0, "label_selector": {self._label: f"!{self._value}"}}
        if child in self._reserved:
            strategy = PlacementGroupSchedulingStrategy(self._group, self._reserved[child])
            return {"num_cpus": cpus, "num_gpus": self._group_gpus, "scheduling_strategy": strategy}
        return {"num_cpus": cpus, "num_gpus": self._gpus[True], "label_selector": {self._label: self._value}}

    async def _spawn(self, child: Child, path: Path) -> Process:
        """Raises OSError."""
        import ray

        reserved = child in self._reserved
        options, group = self.options(child), self._group if reserved else None
        runner = ray.remote(ProcessActor).options(max_concurrency=3, **options)
        actor = runner.remote(child.arguments, child.environment, self._allocator)
        starting = asyncio.ensure_future(actor.start.remote())
        stopping = asyncio.create_task(self.stopped.wait())
        switched = asyncio.create_task(self._switched.next.wait())
        try:
            while not starting.done():
                await asyncio.wait(
                    {starting, stopping, switched} if reserved else {starting, stopping},
                    timeout=START_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if stopping.done() or child.removed:
                    ray.kill(actor)
                    raise OSError("the service stops" if stopping.done() else "it is not wanted any more")
                if reserved and switched.done() and not starting.done():
                    ray.kill(actor)
                    return await self._spawn(child, path)
                if not starting.done():
                    print(f"{child.name} waits for a node", flush=True)
            node, pid = await starting
        except ray.exceptions.RayError as error:
            raise OSError(first_line(error)) from None
        finally:
            stopping.cancel()
            switched.cancel()
        process = RayProcess(actor, node, pid, path, child, options["num_gpus"], group)
        self._processes.add(process)
        return process


def _has_gpu(node: dict[str, Any]) -> bool:
    """Whether this one of Ray's nodes has a whole GPU."""
    return bool(node["Resources"].get("GPU", 0) >= 1)


def _remove_group(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def is_in_the_way(
    placed: Collection[str],
    bundle: Mapping[str, float],
    larger: Mapping[str, float],
    free: Mapping[str, Mapping[str, float]],
) -> bool:
    """Whether as many ``larger`` bundles as there are bundles ``placed`` (the node of each) have room only without
    these. ``free`` are the resources that each usable node has left."""

    def room(nodes: Iterable[Mapping[str, float]]) -> int:
        return sum(min(int(node.get(kind, 0.0) / amount + 1e-6) for kind, amount in larger.items()) for node in nodes)

    without = [
        {kind: left.get(kind, 0.0) + bundle.get(kind, 0.0) * [*placed].count(node) for kind in larger}
        for node, left in free.items()
    ]
    return room(free.values()) < len(placed) <= room(without)


def _scale_file(data: Path, model: str) -> Path:
    return data / "scale" / f"{file_name(model)}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def write_scale(data: Path, model: str, count: int) -> None:
    """Have ``count`` rollout workers of ``model`` in addition to the configured ones. The process of the model, which
    runs on the service's machine, reads it."""
    path = _scale_file(data, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(str(count), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def clear_scale(data: Path) -> None:
    """No base model has more workers than the configured ones."""
    shutil.rmtree(data / "scale", ignore_errors=True)


def read_scale(data: Path, model: str) -> int:
    """As :func:`write_scale` wrote; 0 where nothing was written."""
    try:
        return int(_scale_file(data, model).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]


def workers(
    settings: Settings, url: str, model: str, token: str, check: Callable[[Collection[str]], object]
) -> RayActors:
    """``settings.server.workers`` reserved and ``ray_spot_workers`` preemptible workers of ``model``."""
    threads = settings.worker.threads or max(1, int(settings.cluster.ray_cpus))
    environment = child_environment(settings.replace(threads=threads), token, {})

    def child(name: str, *more: str) -> Child:
        arguments = ["--connect", url, "--model", model, "--name", f"{name}@{NODE}", "--die-with-parent", *more]
        return Child(f"ray-worker-{name}", ["rookery.worker.process", *arguments], environment)

    name = file_name(model)
    reserved = [child(f"{name}-{i + 1}") for i in range(settings.server.workers)]
    options = ("--preemptible", "--roles", "rollout")
    spot = [child(f"{name}-spot-{i + 1}", *options) for i in range(settings.cluster.ray_spot_workers)]
    return RayActors(
        settings, reserved, spot, [], check,
        lambda number: child(f"{name}{SCALED}{number}", *options), lambda: read_scale(settings.data, model),
    )  # fmt: skip


_watched: dict[bytes, tuple[bytes, float]] = {}
"""The requests in Ray's store as this process read them last, and since when each is the same."""


def scale_to(wanted: Sequence[tuple[dict[str, float], dict[str, str]]]) -> None:
    """Ask Ray's autoscaler for nodes that fit each of ``wanted`` (resources, and labels of the node), besides what the
    processes of other base models ask for. An empty list ends this process's request. Without an autoscaler it has no
    effect."""
    import ray
    from ray.autoscaler.sdk import request_resources
    from ray.experimental import internal_kv as kv

    key, now = REQUESTS + ray.get_runtime_context().get_job_id().encode(), time.monotonic()
    if wanted:
        ours = json.dumps({"repeat": secrets.token_hex(8), "wanted": wanted})
        kv._internal_kv_put(key, ours.encode(), overwrite=True)
    else:
        kv._internal_kv_del(key)
    bundles, selectors, requests = [], [], kv._internal_kv_list(REQUESTS)
    for ended in _watched.keys() - {*requests}:
        del _watched[ended]
    for other in sorted(requests):
        content = kv._internal_kv_get(other) or b'{"wanted": []}'
        last, since = _watched.get(other, (b"", now))
        since = since if last == content else now
        _watched[other] = content, since
        if now - since > FORGOTTEN_SECONDS:
            kv._internal_kv_del(other)
            del _watched[other]
            continue
        request = json.loads(content)
        bundles += [resources for resources, _ in request["wanted"]]
        selectors += [labels for _, labels in request["wanted"]]
    request_resources(bundles=bundles, bundle_label_selectors=selectors)


def addresses(nodes: list[dict[str, Any]]) -> set[str]:
    """The addresses of those of Ray's ``nodes`` that are alive."""
    return {node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def address_for_nodes(settings: Settings, connect: str, own: str, nodes: Collection[str]) -> str:
    """The address at which processes on all ``nodes`` (their addresses, as Ray knows them) reach the service, which
    this machine, ``own`` to Ray, reaches at ``connect``. A ``url`` of this machine alone is for its clients, not for
    nodes. Raises UserError if the service listens for this machine alone and there are others."""
    url = service_url(settings.server.url, "setting ROOKERY_URL") if settings.server.url else ""
    if url and not is_loopback(url):
        return url
    parts = urlsplit(connect)
    if dialled_host(settings.server.host) != settings.server.host:
        return join_address(parts.scheme, own, parts.port or DEFAULT_PORTS[parts.scheme])
    address = url if url and is_loopback(connect) else connect
    if is_loopback(address) and (others := sorted({*nodes} - {own})):
        given = f"ROOKERY_URL={address}" if address == url else address
        raise UserError(
            f"the Ray cluster has nodes at {', '.join(others[:3])}, which do not reach {given}; start the service"
            " with --host 0.0.0.0, or set ROOKERY_URL to an address that they reach"
        )
    return address


def draining_nodes() -> set[str]:
    """Ids of the nodes that Ray is about to remove."""
    import ray

    return set(ray._private.state.state.get_draining_nodes())


def check(address: str) -> None:
    """Raises UserError if Ray is not installed, Unavailable if no gRPC server, as a head is one, answers at
    ``address``."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"cluster ray: Ray is not installed; {installs('ray')}")
    if address == "auto":
        return
    given = urlsplit(f"//{address}")
    try:
        with socket.create_connection((given.hostname, given.port or HEAD_PORT), CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):  # else the certificates tell
                connection.sendall(GREETING)
                if connection.makefile("rb").read(4)[3:] != SETTINGS_FRAME:
                    raise ValueError("another program listens there")
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: Exception) -> Unavailable:
    return Unavailable(f"ray_address {address}: no Ray cluster answers ({error}); start one: ray start --head")


def connect(address: str) -> None:
    """Become a driver of the Ray cluster. Raises Unavailable if there is none now."""
    check(address)
    import ray

    try:
        ray.init(address=address, namespace="rookery", configure_logging=False, log_to_driver=False)
    except ConnectionError as error:
        raise _no_cluster(address, error) from None


async def supervise(actors: RayActors) -> str:
    on_end_signals(actors.stopped.set)
    return await actors.run()


def end() -> None:
    """The service is lost: end this process, and with it the request for nodes if Ray answers soon."""
    timer = threading.Timer(END_SECONDS, os._exit, (LOST,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(Exception):
        scale_to([])
    os._exit(LOST)


def main() -> int:
    parser = argparse.ArgumentParser(prog="rookery.cluster.ray", description="Processes on the nodes of a Ray cluster.")
    parser.add_argument("--connect", required=True, metavar="URL", help="the service's address")
    parser.add_argument("--model", help="the base model of the workers; without it, the built-in environments' host")
    given = parser.parse_args()
    die_with_parent(end)
    try:
        settings, token = Settings.load(), token_of()
        connect(settings.cluster.ray_address)
        import ray

        check = partial(address_for_nodes, settings, given.connect, ray.util.get_node_ip_address())
        url = check(addresses(ray.nodes()))
        if given.model:
            actors = workers(settings, url, given.model, token, check)
        else:
            host = environment_host(settings, url, token)
            host.environment = child_environment(settings, token, {})
            actors = RayActors(settings, [], [], [host], check)
        refused = asyncio.run(supervise(actors))
    except Unavailable as error:  # it may come: the service starts this process again
        to_stderr(error)
        return LOST
    except UserError as error:
        refused = str(error)
    if refused:
        to_stderr(refused)
    return EXIT_REFUSED if refused else 0


if __name__ == "__main__":
    sys.exit(main())
