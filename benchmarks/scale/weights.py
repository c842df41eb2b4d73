"""Artifacts from one worker to many: real processes and sockets, one network namespace per worker, limited uplinks.

``python -m benchmarks.scale.weights [--quick] [--mega N] [--rate MBIT]``. Workers of a site share a bridge; sites meet
in another one, whose interfaces count the bytes that cross. Every worker's uplink has a limit, so times are ratios to
one copy over that uplink. The decision is the shipped one, or that of an arm; everything else is the same. It needs
Linux with user namespaces, ``ip``, ``tc``, ``unshare`` and ``nsenter``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from benchmarks.lib.harness import ROOT, Result, command
from benchmarks.lib.weights_node import ABLATIONS

from rookery import protocol
from rookery.scheduling.replication import MODEL_HOPS, SERVICE, Replica, plan_routes
from rookery.simulation.fakes.service import MEMORY
from rookery.storage.artifacts import Artifacts

SERVICE_HOST = "10.9.0.1"
SITES, MOST = 4, 16
VISIBLE = 1.1
"""Without a part that matters a figure is larger by this factor, which is far above the noise of counted bytes."""
PATIENCE = 900.0
PULLED = ("pulled_from_peers_bytes", "pulled_from_service_bytes")
SILENT_SECONDS = 5.0
"""Of a source that sends nothing, before a worker reads elsewhere: the worker's own value. A star is slower."""
SHARES = (0.1, 0.5, 0.9)
"""Of a transfer, when something is killed."""
RECEIVED, SENT = 0, 8
"""Columns of ``/proc/net/dev``."""
INSIDE = "ROOKERY_BENCH_NAMESPACE"


def shell(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


class Network:
    """Bridges of sites, their trunks to a core bridge, and processes at them."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        shell("ip", "link", "set", "lo", "up")
        shell("ip", "link", "add", "core", "type", "bridge")
        shell("ip", "link", "set", "core", "up")
        for site in range(SITES):
            shell("ip", "link", "add", f"site{site}", "type", "bridge")
            shell("ip", "link", "add", f"in{site}", "type", "veth", "peer", "name", f"out{site}")
            shell("ip", "link", "set", f"in{site}", "master", f"site{site}")
            shell("ip", "link", "set", f"out{site}", "master", "core")
            for device in (f"site{site}", f"in{site}", f"out{site}"):
                shell("ip", "link", "set", device, "up")
        shell("ip", "addr", "add", f"{SERVICE_HOST}/16", "dev", "site0")

    def start(self, number: int, site: int, *words: str) -> subprocess.Popen[bytes]:
        """A process in a namespace of its own at a site, with the address of its number."""
        address = f"10.9.1.{number}"
        process = subprocess.Popen(
            ["unshare", "-n", sys.executable, "-c", "import sys; sys.stdin.readline(); import os;"
             "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])", *words, "--address", address],
            stdin=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{process.pid}/ns/net") == own:
            time.sleep(0.01)
        shell("ip", "link", "add", f"w{number}", "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        shell("ip", "link", "set", f"w{number}", "master", f"site{site}", "up")
        inside = ["nsenter", "-t", str(process.pid), "-n"]
        shell(*inside, "ip", "link", "set", "lo", "up")
        shell(*inside, "ip", "addr", "add", f"{address}/16", "dev", "eth0")
        shell(*inside, "ip", "link", "set", "eth0", "up")
        if self.rate:
            limit = ["rate", f"{self.rate:g}mbit", "burst", "256kb", "latency", "200ms"]
            shell(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        return process

    def close(self) -> None:
        for device in ("core", *(f"{kind}{site}" for site in range(SITES) for kind in ("site", "out"))):
            shell("ip", "link", "del", device)

    def cut(self, site: int, *, up: bool = False) -> None:
        """No packet passes between a site and the others; with ``up`` they do again."""
        shell("ip", "link", "set", f"out{site}", "up" if up else "down")

    def into(self, site: int) -> int:
        """Bytes that came to a site from others."""
        return self._count(f"out{site}", SENT)

    def sent(self, number: int) -> int:
        """Bytes that a process sent."""
        return self._count(f"w{number}", RECEIVED)

    def _count(self, device: str, column: int) -> int:
        [line] = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if f" {device}:" in f" {line}"]
        return int(line.split(":")[1].split()[column])


class Bench:
    def __init__(self, folder: Path, rate: float, peer_seconds: float = 600.0) -> None:
        self.folder = folder
        self.network = Network(rate)
        self.peer_seconds = peer_seconds
        self.artifacts = Artifacts(folder / "artifacts")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.number: dict[str, int] = {}
        self.started = 0

    def store(self, size: int) -> str:
        """A new artifact that the service and the trainer have."""
        staging = self.artifacts.begin()
        left = size

        def blocks() -> Any:
            nonlocal left
            while left:
                part = min(left, 1 << 20)
                left -= part
                yield os.urandom(part)

        staging.write("model.safetensors", blocks())
        digest = staging.commit().hash
        kept = self.folder / "trainer" / digest
        kept.mkdir(parents=True)
        for path in (self.artifacts.root / digest).iterdir():
            os.link(path, kept / path.name)
        (kept / ".adapter").touch()
        return digest

    def fresh(self, size: int) -> str:
        """:meth:`store`, after the last one is deleted: few fit the memory. A new trainer has it."""
        for root in (self.artifacts.root, self.folder / "trainer"):
            for path in root.glob("[0-9a-f]" * 64) if root.is_dir() else ():
                shutil.rmtree(path)
        digest = self.store(size)
        if "trainer" in self.processes:
            self.kill("trainer")
        self.node("trainer", 0)
        self.settle({"trainer"})
        return digest

    def serve(self) -> None:
        words = ["-m", "benchmarks.lib.weights_service", "--artifacts", str(self.artifacts.root), "--host"]
        self.processes["service"] = subprocess.Popen([sys.executable, *words, SERVICE_HOST], cwd=ROOT)
        self.http = httpx.Client(base_url=f"http://{SERVICE_HOST}:7077", timeout=30.0, trust_env=False)

    def node(self, name: str, site: int) -> None:
        self.started += 1
        self.number[name] = self.started
        (self.folder / name).mkdir(mode=0o700, exist_ok=True)
        (self.folder / name).chmod(0o700)
        self.processes[name] = self.network.start(
            self.started, site, "-m", "benchmarks.lib.weights_node", "--connect", f"http://{SERVICE_HOST}:7077",
            "--name", name, "--site", f"s{site}", "--cache", str(self.folder / name),
            "--peer-seconds", f"{self.peer_seconds:g}",
        )  # fmt: skip

    def state(self, digest: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self.http.get(f"/state/{digest}").json()
        except httpx.HTTPError:
            return {"working": [], "arrived": {}, "receiving": {}, "pulled": {}}
        return found

    def until(self, holds: Any) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, "it took too long"
            time.sleep(0.05)

    def settle(self, names: set[str]) -> None:
        self.until(lambda: names <= set(self.state("none")["working"]))

    def begin(self, digest: str, receivers: list[str], arm: str = "ours") -> float:
        text = ",".join(receivers)
        return float(self.http.post(f"/replicate/{digest}", params={"arm": arm, "receivers": text}).json())

    def run(self, digest: str, receivers: list[str], arm: str = "ours", *, whole: bool = False) -> dict[str, float]:
        """Replicate and evict: seconds, payload that crossed sites and left the trainer, in copies."""
        for name in receivers:
            os.kill(self.processes[name].pid, signal.SIGUSR1 if whole else signal.SIGUSR2)
        size = self.artifacts.open(digest).size
        crossed = [self.network.into(site) for site in range(SITES)]
        trainer = self.number.get("trainer", self.number[receivers[0]])
        sent = self.network.sent(trainer)
        begun = self.begin(digest, receivers, arm)
        self.until(lambda: set(receivers) <= set(self.state(digest)["arrived"]))
        state = self.state(digest)
        seconds = max(state["arrived"][name] for name in receivers) - begun
        time.sleep(0.3)  # the last acknowledgements
        crossing = sum(self.network.into(site) - crossed[site] for site in range(1, SITES))
        figures = {
            "seconds": seconds,
            "crossed": crossing / size,
            "egress": (self.network.sent(trainer) - sent) / size,
            "service": state["routed"].get("service", 0),
        }
        self.check(digest, receivers)
        self.http.post(f"/evict/{digest}")
        self.until(lambda: not any((self.folder / name / digest).exists() for name in receivers))
        return figures

    def check(self, digest: str, receivers: list[str]) -> None:
        """Every receiver has the bytes that the hash names."""
        want = {shard.name: shard.sha256 for shard in self.artifacts.open(digest).shards}
        for name in receivers:
            for shard, sha256 in want.items():
                found = subprocess.run(
                    ["sha256sum", self.folder / name / digest / shard], capture_output=True, text=True, check=True
                )
                assert found.stdout.split()[0] == sha256, f"{name} has other bytes"

    def here(self, name: str, digest: str) -> int:
        """The bytes that a worker has."""
        return sum(path.stat().st_size for path in (self.folder / name / digest).glob("model.safetensors*"))

    def complete(self, name: str, digest: str) -> bool:
        return (self.folder / name / digest / ".adapter").exists()

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        self.http.close()
        self.network.close()


def names(count: int, sites: int) -> list[str]:
    """Receivers, in turn at each site. Neighbours by name are at different sites: else a chain in the order of names
    would cross between sites as seldom as one that knows them."""
    return [f"w{number:02d}s{number % sites}" for number in range(count)]


def chain(result: Result, given: argparse.Namespace, folder: Path) -> None:
    """One copy, and the chain of each number of receivers at one site in ``--chain``; the longest with each part of a
    block's path changed."""
    size, longest = given.mega * 1_000_000, max(given.chain)
    bench = Bench(folder, given.rate)
    try:
        bench.serve()
        receivers = names(longest, 1)
        for name in receivers:
            bench.node(name, 0)
        bench.settle(set(receivers))
        arms = [(count, arm) for count in given.chain for arm in given.arms]
        arms = [arm for arm in arms if arm[1] == "ours" or arm[0] <= given.most_star]
        copies = [bench.run(bench.fresh(size), names(1, 1))["seconds"] for _ in range(2)]
        copy = min(copies)
        title = f"{given.mega} MB over one uplink of {given.rate:g} Mbit/s, load {os.getloadavg()[0]:.0f}"
        result.add(title, copies, "s")
        for count, arm in arms:
            figures = bench.run(bench.fresh(size), names(count, 1), arm, whole=arm == "tree")
            note = f"trainer sent {figures['egress']:.2f} copies, load {os.getloadavg()[0]:.0f}"
            what = f"{given.mega} MB to {count} receivers, {arm}"
            result.add(what, [figures["seconds"] / copy], "x one copy", note)
            if (count, arm) == (longest, "ours"):
                flat, sent = figures["seconds"] / copy, figures["egress"]
                what = f"{longest} receivers of {given.mega} MB: <= 1.5 x one copy, the trainer sends at most 2"
                result.judge(what, f"{flat:.2f} x, {sent:.2f}", flat <= 1.5 and sent <= 2.2)
        for number, ablation in enumerate(ABLATIONS[1:] if given.ablate else [], 1):
            digest = bench.fresh(size)
            for name in ["trainer", *receivers]:
                os.kill(bench.processes[name].pid, signal.SIGRTMIN + number)
            figures = bench.run(digest, receivers)
            what = f"{given.mega} MB to {longest} receivers, ours, {ablation}"
            result.add(what, [figures["seconds"] / copy], "x one copy", f"load {os.getloadavg()[0]:.0f}")
    finally:
        bench.close()


def measure(result: Result, given: argparse.Namespace, folder: Path) -> None:
    size = given.mega * 1_000_000
    bench = Bench(folder, given.rate)
    try:
        sizes = (1, 2, 4, MOST) if given.quick else (1, 2, 4, 8, MOST)
        stored = [bench.store(size) for _ in range(3 * len(sizes) + 6)]
        everyone = sorted({*names(MOST, 1), *names(MOST, SITES)})
        bench.serve()
        bench.node("trainer", 0)
        for name in everyone:
            bench.node(name, int(name.rpartition("s")[2]))
        bench.settle({"trainer", *everyone})
        copy = bench.run(stored.pop(), names(1, 1))["seconds"]
        result.add("one copy over one uplink", [copy], "s", f"{given.mega} MB, {given.rate:g} Mbit/s")
        times: dict[str, dict[int, float]] = {arm: {} for arm in ("star", "tree", "ours")}
        for count in sizes:
            for arm in times:
                figures = bench.run(stored.pop(), names(count, 1), arm, whole=arm == "tree")
                times[arm][count] = figures["seconds"] / copy
                note = f"trainer sent {figures['egress']:.3f} copies"
                result.add(f"{count} receivers at one site, {arm}", [times[arm][count]], "x one copy", note)
        result.data["times"] = times
        flat = times["ours"][MOST]
        result.judge(f"time of {MOST} receivers <= 1.5 x one copy", f"{flat:.2f} x", flat <= 1.5)
        result.judge(
            "the star's time grows with the receivers", f"{times['star'][MOST]:.1f} x", times["star"][MOST] > MOST / 2
        )
        far = names(MOST, SITES)
        arms = [
            ("ours", "ours", False), ("without partial sources", "ours", True),
            ("without topology", "no topology", False), ("without one seed per site", "no seed per site", False),
        ]  # fmt: skip
        crossed, taken = dict[str, float](), dict[str, float]()
        for what, arm, whole in arms:
            figures = bench.run(stored.pop(), far, arm, whole=whole)
            crossed[what], taken[what] = figures["crossed"], figures["seconds"]
            note = f"{figures['crossed']:.3f} copies crossed, trainer sent {figures['egress']:.3f}"
            result.add(f"{MOST} receivers at {SITES} sites, {what}", [figures["seconds"] / copy], "x one copy", note)
            if what == "ours":
                measured = f"{figures['crossed']:.3f} copies for {SITES - 1}"
                overhead = figures["crossed"] / (SITES - 1)
                result.judge("one copy crosses to each site (headers of packets included)", measured, overhead < 1.1)
                sent = figures["egress"]
                result.judge("the trainer sends at most sites + 1 copies", f"{sent:.3f}", sent <= 1.1 * (SITES + 1))
        for figure, found, unit, without in (
            ("copies cross", crossed, "", ("without topology", "without one seed per site")),
            ("the time", taken, " s", ("without partial sources",)),
        ):
            for what in without:
                told = f"{found[what]:.1f}{unit}; with all parts {found['ours']:.1f}{unit}"
                result.judge(f"{what}, over {VISIBLE} x {figure}", told, found[what] > VISIBLE * found["ours"])
        kills(result, bench, size, copy)
    finally:
        bench.close()


def vanishing(result: Result, folder: Path, size: int, rate: float, shares: Sequence[float] = SHARES) -> None:
    """At 10, 50 and 90% of a transfer to three sites one of them vanishes: its workers are dead, and no packet says so.
    The others receive the rest from elsewhere; its workers do so once they are back."""
    bench, copy = Bench(folder, rate, SILENT_SECONDS), size * 8 / (rate * 1e6)
    try:
        stored = [bench.store(size) for _ in shares]
        receivers = names(6, 3)
        bench.serve()
        bench.node("trainer", 0)
        for name in receivers:
            bench.node(name, int(name.rpartition("s")[2]))
        lost = [name for name in receivers if name.endswith("s1")]
        left = [name for name in receivers if name not in lost]
        for share, digest in zip(shares, stored, strict=True):
            bench.settle({"trainer", *receivers})
            begun = bench.begin(digest, receivers)
            bench.until(lambda digest=digest, part=share * size: any(bench.here(one, digest) >= part for one in lost))
            bench.network.cut(1)
            for name in lost:
                bench.kill(name)
            bench.until(lambda digest=digest: all(bench.complete(name, digest) for name in left))
            seconds = time.time() - begun
            bench.check(digest, left)
            result.add(f"a site vanishes at {share:.0%}", [seconds / copy], "x one copy", f"{seconds:.1f} s")
            most = 2 * copy + 2 * SILENT_SECONDS
            target = f"a site vanishes at {share:.0%}: two copies' time and the wait for two silent sources at most"
            result.judge(target, f"{seconds:.1f} of {most:.1f} s", seconds <= most)
            bench.network.cut(1, up=True)
            for name in lost:
                bench.node(name, 1)
            bench.until(lambda digest=digest: all(bench.complete(name, digest) for name in lost))
            bench.check(digest, lost)
            bench.http.post(f"/evict/{digest}")
    finally:
        bench.close()


def kills(result: Result, bench: Bench, size: int, copy: float) -> None:
    """kill -9 of source, receiver and service at 10, 50 and 90% of a transfer along a chain."""
    for share in SHARES:
        for victim in ("source", "receiver", "service"):
            digest = bench.store(size)
            bench.kill("trainer")
            bench.node("trainer", 0)
            chain = [name for name in names(4, 1) if name in bench.processes]
            bench.settle({"trainer", *chain})
            for name in chain:
                os.kill(bench.processes[name].pid, signal.SIGUSR2)
            before = bench.state(digest)["pulled"]
            begun = bench.begin(digest, chain)
            bench.until(lambda first=chain[0], digest=digest, part=share * size: bench.here(first, digest) >= part)
            left = set(chain)
            if victim == "service":
                bench.kill("service")
                bench.serve()
            else:
                name = {"source": "trainer", "receiver": chain[1]}[victim]
                bench.kill(name)
                left.discard(name)
            bench.until(lambda left=left, digest=digest: all(bench.complete(one, digest) for one in left))
            seconds = time.time() - begun
            bench.check(digest, sorted(left))
            bench.settle(left)

            def pulled(left: Any = left, before: Any = before, digest: str = digest) -> list[float]:
                after = bench.state(digest)["pulled"]
                return [
                    sum(after.get(name, {}).get(gauge, 0.0) - before.get(name, {}).get(gauge, 0.0) for gauge in PULLED)
                    for name in left
                ]

            bench.until(lambda pulled=pulled: min(pulled()) >= size)  # the heartbeat that counts the last byte
            again = sum(pulled()) - len(left) * size
            note = f"{again / 1e6:.2f} MB received twice"
            result.add(f"kill -9 of the {victim} at {share:.0%}", [seconds / copy], "x one copy", note)
            result.judge(f"kill -9 of the {victim} at {share:.0%}: every byte right, none received twice",
                         note, abs(again) <= 1 << 20)  # fmt: skip
            if victim == "receiver":
                bench.node(chain[1], 0)
            bench.http.post(f"/evict/{digest}")


def null_case(result: Result, folder: Path, mega: float, repeats: int) -> None:
    """One receiver of an artifact that only the service has, against a plain download of the same bytes, which are
    hashed while they arrive too."""
    bench = Bench(folder, 0.0)
    size = int(mega * 1e6)
    try:
        staged = [bench.store(size) for _ in range(repeats)]
        shutil.rmtree(bench.folder / "trainer")
        bench.serve()
        bench.node("w00s0", 0)
        bench.settle({"w00s0"})
        ratios, routed = [], 0
        for digest in staged:
            started = time.perf_counter()
            signature = protocol.sign_read(
                protocol.read_key("the hash of a key of the role worker"), digest, time.time()
            )
            target, digest_of = folder / "plain", hashlib.sha256()
            with (
                bench.http.stream(
                    "GET", f"/wire/artifacts/{digest}/model.safetensors", headers={protocol.READ_HEADER: signature}
                ) as answer,
                target.open("wb") as file,
            ):
                for block in answer.iter_raw():
                    file.write(block)
                    digest_of.update(block)
            found = digest_of.hexdigest()
            plain = time.perf_counter() - started
            assert [shard.sha256 for shard in bench.artifacts.open(digest).shards] == [found]
            figures = bench.run(digest, ["w00s0"])
            routed += int(figures["service"])
            ratios.append(figures["seconds"] / plain)
        result.add(f"one receiver of {mega:g} MB, of a plain copy's time", ratios, "x", f"{routed} from the service")
        within = statistics.median(ratios)
        result.judge(f"one receiver of {mega:g} MB: within 5% of a plain copy, and no replication", f"{within:.2f} x",
                     within <= 1.05 and routed == repeats)  # fmt: skip
    finally:
        bench.close()


def simulated(result: Result) -> None:
    """Simulated: times of routes by the shipped decision, each uplink shared by its readers, chunks of 1 MiB."""
    for sites in (1, 5):
        for count in (1, 2, 4, 16, 64, 250, 1000):
            receivers = [Replica(f"w{i}", f"m{i}", f"s{i % sites}") for i in range(count)]
            begun = time.perf_counter()
            routes = plan_routes(receivers, [Replica("trainer", "t", "s0")], site="s0", hops=MODEL_HOPS)
            spent = time.perf_counter() - begun
            at = {one.name: one.site for one in receivers} | {"trainer": "s0", SERVICE: "s0"}
            crossing = sum(at[route.source] != at[route.receiver] for route in routes)
            readers: dict[str, int] = {}
            for route in routes:
                readers[route.source] = readers.get(route.source, 0) + 1
            chunks, finish = 270, dict.fromkeys(("trainer",), [0.0] * 270)
            for route in routes:
                rate, times, free = readers[route.source], [], 0.0
                for chunk in finish[route.source]:
                    free = max(free, chunk) + rate / chunks
                    times.append(free)
                finish[route.receiver] = times
            longest = max(times[-1] for times in finish.values())
            note = (
                f"{crossing} copies cross, trainer sends {readers.get('trainer', 0)}, decided in {spent * 1e3:.0f} ms"
            )
            result.add(f"simulated: {count} receivers at {sites} sites", [longest], "x one copy", note)
            bound = 1 + count / chunks
            if count == 1000:
                what = f"simulated: 1,000 receivers at {sites} sites: one copy per site, time flat"
                result.judge(what, f"{crossing} copies, {longest:.1f} x", crossing == sites - 1 and longest <= bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mega", type=int, default=270, help="megabytes of the artifact")
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s of each uplink")
    parser.add_argument("--quick", action="store_true", help="fewer numbers of receivers")
    parser.add_argument("--null-mega", type=float, nargs="*", default=[5, 270])
    parser.add_argument("--chain", type=int, nargs="*", help="only these numbers of receivers at one site")
    parser.add_argument("--arms", nargs="*", default=["star", "tree", "ours"], help="with --chain")
    parser.add_argument("--most-star", type=int, default=4, help="with --chain: receivers of a star or tree at most")
    parser.add_argument("--ablate", action="store_true", help="with --chain: the longest with each part changed")
    parser.add_argument("--folder", help="where files go, instead of the memory")
    given = parser.parse_args()
    if not os.environ.get(INSIDE):
        arguments = [sys.executable, "-m", "benchmarks.scale.weights", *sys.argv[1:]]
        os.execvpe("unshare", ["unshare", "-Urn", *arguments], {**os.environ, INSIDE: "1"})
    result = Result("weights", "Artifacts from one worker to many", command())
    memory = given.folder or MEMORY
    if given.chain:
        result = Result(f"weights_chain_{given.mega}", "One artifact along a chain of workers", command())
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            chain(result, given, Path(folder))
        result.save()
        return
    simulated(result)
    for mega in given.null_mega:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            null_case(result, Path(folder), mega, 5)
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        measure(result, given, Path(folder))
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        vanishing(result, Path(folder), given.mega * 1_000_000, given.rate)
    result.save()


if __name__ == "__main__":
    main()
