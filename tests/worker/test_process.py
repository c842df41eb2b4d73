"""Real worker processes over a real connection, under faults."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.support.dialled import PATIENCE_SECONDS, Connection, Dialled, Stream
from tests.support.forked import ForkedProcess
from tests.support.peers import eventually, settle
from tests.support.small_model import save_small_model
from tests.support.tiny import COMPUTED

from rookery import protocol
from rookery.errors import EXIT_REFUSED, UserError
from rookery.worker import teams
from rookery.worker.compute_status import IDLE
from rookery.worker.connection import progress
from rookery.worker.engine.native import kernels
from rookery.worker.memory import TooSmall
from rookery.worker.model.convert import prepare
from rookery.worker.training_ops import TrainingOps
from rookery.worker.transfer.http import CorruptDownload, TransferFailed

PROMPT = [40, 41, 42, 43, 44, 45]
LONG = 400
"""Tokens of a request that still runs when the test acts: a small model samples some hundred per second."""


Start = Callable[..., ForkedProcess]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    prepare(str(save_small_model(folder / "small")), folder / "cache")
    return folder


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Dialled]:
    with Dialled(tmp_path / "artifacts") as service:
        yield service


@pytest.fixture
def start(service: Dialled, cache: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a worker of the service; all of them are killed afterwards."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments: str, before: str = "", token: str = "token", **settings: str) -> ForkedProcess:
            code = f"{before}\nimport sys\nfrom rookery.worker.process import main\nsys.exit(main(sys.argv[1:]))"
            options = ["--connect", service.url, "--model", str(cache / "small")]
            environment = {**os.environ, "ROOKERY_TOKEN": token, "ROOKERY_CACHE": str(cache / "cache")}
            environment |= {"ROOKERY_THREADS": "1"} | {
                f"ROOKERY_{name.upper()}": value for name, value in settings.items()
            }
            process = ForkedProcess(code, [*options, *arguments], environment)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield begin


SLOW = """
import time
from rookery.worker.engine.native.engine import NativeEngine
step = NativeEngine.step
def slow(self):
    time.sleep(0.005)
    return step(self)
NativeEngine.step = slow
"""
"""A text of ``LONG`` tokens takes seconds."""


HELD = """
import pathlib, time
from rookery.worker.engine.native.engine import NativeEngine
step, switch_adapter = NativeEngine.step, NativeEngine.switch_adapter
def held(self):
    if self.generated >= {tokens} and not pathlib.Path({go!r}).exists():
        time.sleep(0.005)
        return False
    return step(self)
def switched(self, request, *given, **more):
    found = switch_adapter(self, request, *given, **more)
    if found and request.startswith("switches"):
        pathlib.Path({go!r}).touch()
    return found
NativeEngine.step, NativeEngine.switch_adapter = held, switched
"""


def held_at(tokens: int, go: Path) -> str:
    """The engine samples about so many tokens in all and no more before the file ``go`` is there, or before the request
    "switches" has changed its adapter: a test acts in the middle of texts that are longer."""
    return HELD.format(tokens=tokens, go=str(go))


SOME = 100
"""Tokens of a text of ``LONG`` ones that is held in its middle."""


SLOW_LOADING = """
import time
from rookery.worker.model import convert
prepare = convert.prepare
def slow(*arguments):
    time.sleep(2)
    return prepare(*arguments)
convert.prepare = slow
"""
"""The worker connects before its model is loaded, however small that is."""


def generate(request: str, adapter: protocol.AdapterRef | None = None, **changes: object) -> protocol.Generate:
    fields: dict = {
        "prompt": PROMPT,
        "shared_prefix": 4,
        "max_tokens": LONG,
        "temperature": 1.0,
        "seed": 5,
        "stop_tokens": [],
    }
    return protocol.Generate(request=request, adapter=adapter, **fields | changes)


def ended(process: ForkedProcess) -> tuple[int, str]:
    """The exit code and the standard error of a process."""
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    return process.wait(), said.decode()


def make_policy(service: Dialled, link: Connection, policy: str, seed: int = 1) -> protocol.AdapterRef:
    """Version 0 of a policy, uploaded and committed."""
    ticket = service.tickets.upload()
    link.send(
        protocol.InitAdapter(
            op=f"init-{policy}", policy=policy, rank=4, alpha=8.0, targets=["q", "v", "down"], seed=seed, upload=ticket
        )
    )
    done = link.done(f"init-{policy}")
    assert done.error == ""
    assert service.collect(ticket) == done.manifest
    return service.ref(done.manifest, 0, policy)


def begun(service: Dialled) -> tuple[Connection, protocol.AdapterRef, Stream]:
    """The first connection, version 0 of a policy, and what that generates for the seed of all requests."""
    link = service.connection(0)
    adapter = make_policy(service, link, "p")
    link.send(generate("whole", adapter))
    return link, adapter, link.finished("whole")


def batch(service: Dialled, tokens: int = 5) -> str:
    member = protocol.GroupMember(
        tokens=list(range(50, 50 + tokens)),
        logprobs=[-5.0] * tokens,
        advantages=[1.0] * tokens,
        weights=[1.0] * tokens,
    )
    return service.tickets.publish_batch(
        protocol.encode(
            protocol.TrainingBatch(groups=[protocol.SharedPrefixGroup(prompt=PROMPT, members=[member, member])])
        )
    )


def forward(op: str, parent: protocol.AdapterRef, ticket: str, **changes: object) -> protocol.ForwardBackward:
    fields: dict = {
        "policy": parent.policy,
        "lease": 1,
        "steps": 0,
        "loss": protocol.Loss(name="importance_sampling"),
        "temperature": 1.0,
        "tenant": "tenant",
    }
    return protocol.ForwardBackward(op=op, parent=parent, batch_ticket=ticket, **fields | changes)


def optim(op: str, parent: protocol.AdapterRef, **changes: object) -> protocol.OptimStep:
    fields: dict = {
        "policy": parent.policy,
        "lease": 1,
        "steps": 0,
        "operations": 1,
        "adam": protocol.Adam(lr=0.05),
        "tenant": "tenant",
    }
    return protocol.OptimStep(op=op, parent=parent, **fields | changes)


# --- joining --------------------------------------------------------------------------------------------------------

HELD_BACK = """
import pathlib, time
import rookery.worker.process as process
prepare = process.prepare
def held_back(name, cache):
    while not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
    return prepare(name, cache)
process.prepare = held_back
"""


def test_worker_connects_and_sends_heartbeats_while_its_model_loads(
    service: Dialled, start: Start, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    start("--price", "0.5", before=HELD_BACK.format(go=str(go)))
    link = service.connection(0)
    assert (link.hello.loading, link.hello.max_context, link.hello.price) == (True, 0, 0.5)
    service.until(lambda: len(link.of(protocol.Heartbeat)) > 5)
    assert link.of(protocol.Ready) == []
    assert {beat.active + beat.waiting + beat.training for beat in link.of(protocol.Heartbeat)} == {0}
    link.drop()
    again = service.connection(1)
    assert again.hello.loading
    go.touch()
    [ready] = service.until(lambda: again.of(protocol.Ready))
    assert ready.max_context == 512
    again.drop()
    last = service.connection(2)
    assert (last.hello.loading, last.hello.max_context, last.hello.model_hash) == (False, 512, ready.model_hash)


def test_token_may_end_with_a_newline(service: Dialled, start: Start) -> None:
    start(token="token\n")
    assert service.connection(0).hello.loading


@pytest.mark.parametrize(("kind", "ends"), [("UserError", EXIT_REFUSED), ("Unavailable", 1)])
def test_worker_whose_model_cannot_be_prepared_exits_with_the_reason(
    service: Dialled, start: Start, tmp_path: Path, kind: str, ends: int
) -> None:
    """With code 1 if a restart may succeed."""
    go = tmp_path / "go"
    broken = HELD_BACK.format(go=str(go)).replace("return prepare", f"raise process.{kind}('no such weights') #")
    worker = start(before=broken)
    link = service.connection(0)
    service.until(lambda: link.of(protocol.Heartbeat))
    go.touch()
    code, said = ended(worker)
    assert code == ends
    assert "no such weights" in said and "Traceback" not in said
    told = link.frames[-1]
    assert isinstance(told, protocol.Draining)
    assert (told.reason, told.refused) == ("no such weights", kind == "UserError")


STUCK = """
import time
from rookery.worker import progress
from rookery.worker.engine.native.engine import NativeEngine
progress.STALL_SECONDS = 1.0
step, wait = NativeEngine.step, time.sleep
def stuck(engine):
    if engine.generated >= 5:
        {how}
    return step(engine)
NativeEngine.step = stuck
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [("wait(3600)", "a slice has not ended, it is in <string>"), ("return False", "(a rollout, 5 of 40 tokens) needs")],
)
def test_heartbeats_of_a_stalled_worker_name_the_reason(service: Dialled, start: Start, how: str, says: str) -> None:
    start(before=STUCK.format(how=how))
    link = service.connection(0)
    service.until(lambda: link.of(protocol.Ready))
    link.send(generate("still", max_tokens=40))
    # a busy machine may stall the first slices too
    [beat, *_] = service.until(lambda: [beat for beat in link.of(protocol.Heartbeat) if says in beat.stalled])
    assert beat.gauges["worker_stalls"] >= 1 and beat.active == 1


def test_sigterm_while_the_model_loads(service: Dialled, start: Start, tmp_path: Path) -> None:
    worker = start(before=HELD_BACK.format(go=str(tmp_path / "never")), drain_seconds="0.5")
    link = service.connection(0)
    service.until(lambda: link.of(protocol.Heartbeat))
    worker.send_signal(signal.SIGTERM)
    assert ended(worker)[0] == 0
    assert isinstance(link.frames[-1], protocol.Draining)


def test_order_is_received_from_another_worker(service: Dialled, start: Start, tmp_path: Path) -> None:
    start("--peer-port", "0")
    one = service.connection(0)
    assert one.hello.address.startswith("http://127.0.0.1:")
    adapter = make_policy(service, one, "p")
    one.send(protocol.VersionCommitted(policy="p", lease=1, ref=adapter))
    service.until(lambda: any(adapter.hash in holding.hashes for holding in one.of(protocol.AdaptersCached)))
    start("--site", "there", cache=str(tmp_path / "cache"))
    two = service.connection(1)
    assert (two.hello.address, two.hello.site, two.hello.adapters) == ("", "there", [])
    damaged = service.store({"adapter_config.json": b"{}"})
    service.artifacts.path(damaged.hash, "adapter_config.json").write_bytes(b"[]")
    held = msgspec.structs.replace(adapter, sources=[one.hello.address])
    two.send(protocol.Replicate(refs=[held, service.ref(damaged, 1, "q")]))
    service.until(lambda: [holding.hashes for holding in two.of(protocol.AdaptersCached)] == [[adapter.hash]])
    assert [name for name, _ in service.requests if name.startswith(adapter.hash)] == []
    [missing] = service.until(lambda: two.of(protocol.PullFailed))
    assert missing.hash == damaged.hash
    assert "corrupt" in missing.error
    whole = sum(shard.size for shard in service.artifacts.open(adapter.hash).shards)
    # a beat may fall into the pull
    service.until(
        lambda: (beats := two.of(protocol.Heartbeat)) and beats[-1].gauges["pulled_from_peers_bytes"] >= whole
    )
    assert two.of(protocol.Heartbeat)[-1].gauges["pulled_from_peers_bytes"] == whole
    two.send(generate("r", adapter, max_tokens=5))
    assert {chunk.version for chunk in two.finished("r").chunks} == {0}
    assert [name for name, _ in service.requests if name.startswith(adapter.hash)] == []


def test_worker_on_the_trainers_machine_has_a_version_before_it_is_committed(service: Dialled, start: Start) -> None:
    start(roles="train")
    one = service.connection(0)
    start(roles="rollout")
    two = service.connection(1)
    assert one.hello.cache == two.hello.cache
    service.until(lambda: two.of(protocol.Ready))
    ticket = service.tickets.upload()
    init = protocol.InitAdapter(op="i", policy="p", rank=4, alpha=8.0, targets=["q"], seed=7, upload=ticket)
    one.send(init)
    [staged] = service.until(lambda: one.of(protocol.VersionStaged))
    assert staged.op == "i"
    ref = protocol.AdapterRef(policy="p", version=0, hash=staged.hash, rank=4, alpha=8.0)
    two.send(protocol.HandOver(ref=ref, folder=staged.folder))
    manifest = one.done("i").manifest
    assert manifest is not None and manifest.hash == staged.hash and service.collect(ticket) == manifest
    [handed] = service.until(lambda: two.of(protocol.HandedOver))
    assert handed.hash == staged.hash
    assert not one.of(protocol.AdaptersCached) and not two.of(protocol.AdaptersCached), "it is not committed"
    two.send(protocol.Replicate(refs=[ref]), generate("r", ref, max_tokens=5))
    one.send(protocol.VersionCommitted(policy="p", lease=1, ref=ref))
    assert len(two.finished("r").tokens) == 5
    for link in (one, two):
        service.until(lambda link=link: [found.hashes for found in link.of(protocol.AdaptersCached)] == [[ref.hash]])
    assert [name for name, _ in service.requests if name.startswith(ref.hash)] == [], "nothing was pulled"
    assert all(beat.gauges["pulled_from_peers_bytes"] == 0 for beat in two.of(protocol.Heartbeat))


# --- generating -----------------------------------------------------------------------------------------------------


def test_tokens_carry_their_version_and_a_failing_request_affects_no_other(service: Dialled, start: Start) -> None:
    start("--name", "one", "--preemptible", "--max-rows", "7", before=SLOW_LOADING)
    link = service.connection(0)
    assert (link.hello.name, link.hello.kind, link.hello.max_rows) == ("one", "preemptible", 7)
    assert (link.hello.loading, link.hello.running) == (True, [])
    [ready] = service.until(lambda: link.of(protocol.Ready))
    assert (ready.max_context, ready.device, len(ready.model_hash)) == (512, "cpu", 64)
    adapter = make_policy(service, link, "p")
    late = service.store({**_files(service, adapter), "trainer_state.safetensors": b"none"})
    bad = service.store({**_files(service, adapter), "adapter_model.safetensors": b"no tensors"})
    damaged = service.store({**_files(service, adapter), "trainer_state.safetensors": b"other"})
    path = service.artifacts.path(damaged.hash, "adapter_model.safetensors")
    path.write_bytes(bytes(len(path.read_bytes())))
    link.send(
        generate("base", max_tokens=40),
        generate("adapted", adapter, max_tokens=40),
        generate("late", service.ref(late, 3, "p", sources=["http://127.0.0.1:1"]), max_tokens=40),
        generate("too long", prompt=PROMPT * 100),
        generate("no adapter", service.ref(bad, 1)),
        generate("damaged", service.ref(damaged, 2)),
    )
    for name, version, policy in [("base", 0, ""), ("adapted", 0, "p")]:
        stream = link.finished(name)
        assert (len(stream.tokens), len(stream.logprobs), stream.finish) == (40, 40, "length")
        assert {(chunk.version, chunk.policy) for chunk in stream.chunks} == {(version, policy)}
    for name, finish, reason in [
        ("too long", "abort", "context"),  # another worker may have a longer one
        ("no adapter", "error", "no safetensors file"),
        ("damaged", "error", "corrupt"),
    ]:
        stream = link.finished(name)
        assert (stream.finish, stream.tokens) == (finish, [])
        assert reason in stream.error
        assert "\n" not in stream.error
    [wanted] = service.until(lambda: link.of(protocol.SourcesRequest))
    assert (wanted.hash, wanted.failed) == (late.hash, "http://127.0.0.1:1")
    link.send(protocol.Sources(hash=late.hash, sources=[]))
    elsewhere = link.finished("late")
    assert {chunk.version for chunk in elsewhere.chunks} == {3}
    assert elsewhere.tokens == link.stream("adapted").tokens  # another version of the same weights
    beats = service.until(
        lambda: (b := link.of(protocol.Heartbeat)) and b[-1].generated >= 120 and b[-1].active == 0 and b
    )
    assert beats[-1].progress > 0
    assert beats[-1].decode_seconds > 0
    assert beats[-1].gauges["worker_memory_bytes"] > 1 << 20


def _files(service: Dialled, ref: protocol.AdapterRef) -> dict[str, bytes]:
    shards = service.artifacts.open(ref.hash).shards
    return {shard.name: service.artifacts.path(ref.hash, shard.name).read_bytes() for shard in shards}


def test_killed_worker_loses_no_received_token(service: Dialled, start: Start, tmp_path: Path) -> None:
    first = start(before=held_at(LONG + SOME, tmp_path / "never"))
    link, adapter, whole = begun(service)
    link.send(generate("cut", adapter))
    link.some("cut", 10)
    first.kill()
    service.until(lambda: link.closed)
    received = link.stream("cut")
    assert received.finish == ""
    start()
    link = service.connection(1)
    assert link.hello.running == []
    link.send(generate("cut", adapter, prefix_tokens=received.tokens))
    rest = link.finished("cut")
    assert rest.first == len(received.tokens)
    assert received.tokens + rest.tokens == whole.tokens
    assert received.logprobs + rest.logprobs == whole.logprobs


def test_lost_connection_loses_no_token(service: Dialled, start: Start, tmp_path: Path) -> None:
    worker = start(before=held_at(LONG + 3 * SOME, go := tmp_path / "go"))
    link, adapter, whole = begun(service)
    link.send(protocol.VersionCommitted(policy="p", lease=1, ref=adapter))
    cached = lambda: [link.hello.adapters, *(holding.hashes for holding in link.of(protocol.AdaptersCached))]  # noqa: E731
    service.until(lambda: any(adapter.hash in hashes for hashes in cached()))
    names = ["claimed", "moved on", "left"]
    link.send(*(generate(name, adapter) for name in names))
    for name in names:
        link.some(name, 5)
    link.drop()
    again = service.connection(1)
    assert again.hello.instance == link.hello.instance
    assert set(again.hello.running) >= set(names)
    assert adapter.hash in again.hello.adapters
    given = link.stream("claimed").tokens
    elsewhere = [*whole.tokens[:5], (whole.tokens[5] + 1) % 256]
    again.send(
        generate("claimed", adapter, prefix_tokens=given, assignment="second"),
        generate("moved on", adapter, prefix_tokens=elsewhere, max_tokens=20, assignment="second"),
    )
    go.touch()
    rest = again.finished("claimed")
    assert rest.first == len(given)
    assert given + rest.tokens == whole.tokens
    moved = again.finished("moved on")
    assert (moved.first, len(moved.tokens)) == (6, 14)
    assert again.stream("left").tokens == []  # nobody claimed it
    again.drop()
    last = service.connection(2)
    assert "claimed" in last.hello.running  # its end was sent, but may not have arrived
    last.send(generate("claimed", adapter))
    assert last.finished("claimed").tokens == whole.tokens
    assert worker.poll() is None


def test_running_request_switches_to_a_newer_version(service: Dialled, start: Start, tmp_path: Path) -> None:
    """With its cache computed again; that a kept one changes the text is the engine's test."""
    start(before=held_at(SOME, tmp_path / "go"))
    link = service.connection(0)
    old = make_policy(service, link, "p")
    ticket = service.tickets.upload()
    link.send(forward("a", old, batch(service)), optim("b", old, upload=ticket))
    new = service.ref(link.done("b").manifest, 1, "p")
    assert service.collect(ticket).hash == new.hash
    link.send(generate("switches", old))
    link.some("switches", 10)
    link.send(
        protocol.SwitchAdapter(request="switches", adapter=new, recompute=True),
        protocol.SwitchAdapter(request="unknown", adapter=new),
    )
    stream = link.finished("switches")
    versions = [chunk.version for chunk in stream.chunks for _ in chunk.tokens]
    cut = versions.index(1)
    assert versions == [0] * cut + [1] * (LONG - cut)
    link.send(generate("old", old), generate("resumed", new, prefix_tokens=stream.tokens[:cut]))
    whole, resumed = link.finished("old"), link.finished("resumed")
    assert whole.tokens[:cut] == stream.tokens[:cut]
    assert whole.logprobs[:cut] == stream.logprobs[:cut]
    assert (stream.tokens[cut:], stream.logprobs[cut:]) == (resumed.tokens, resumed.logprobs)


def test_unclaimed_requests_are_deleted_after_the_rejoin_period(service: Dialled, start: Start, tmp_path: Path) -> None:
    start(before=held_at(SOME, tmp_path / "never"), rejoin_seconds="3")
    link = service.connection(0)
    link.send(generate("r", max_tokens=500, prompt=[1], shared_prefix=0))
    link.some("r", 1)
    link.drop()
    assert service.connection(1).hello.running == ["r"]
    number = 1
    while (
        again := service.connection(number)
    ).hello.running:  # it reconnects each time, until it has deleted the request
        again.drop()
        number += 1
        assert number < 100
    service.until(lambda: (beats := again.of(protocol.Heartbeat)) and beats[-1].active == 0)


def test_requests_not_claimed_after_a_reconnection_are_aborted(service: Dialled, start: Start) -> None:
    service.resume_seconds = 0.3
    start(resume_seconds="60", max_rows="1")  # the service's value holds
    link = service.connection(0)
    link.send(*(generate(f"r{number}") for number in range(50)))
    link.some("r0", 1)
    link.drop()
    again = service.connection(1)
    assert len(again.hello.running) == 50
    service.until(lambda: (beats := again.of(protocol.Heartbeat)) and beats[-1].active + beats[-1].waiting == 0)
    assert again.of(protocol.Heartbeat)[-1].generated < 50 * LONG


def test_stopped_worker_reconnects_and_resumes(service: Dialled, start: Start, tmp_path: Path) -> None:
    worker = start(before=held_at(SOME, go := tmp_path / "go"))
    link = service.connection(0)
    link.send(generate("r"))
    link.some("r", 5)
    worker.send_signal(signal.SIGSTOP)
    link.drop()
    had = link.stream("r").tokens
    worker.send_signal(signal.SIGCONT)
    again = service.connection(1)
    assert again.epoch != link.epoch
    again.send(generate("r", prefix_tokens=had))
    go.touch()
    assert len(had) + len(again.finished("r").tokens) == LONG


def test_aborted_request_may_start_again_under_its_name(service: Dialled, start: Start) -> None:
    start()
    link = service.connection(0)
    link.send(generate("r"), generate("aborted"))
    link.some("r", 3)
    link.send(protocol.Abort(request="r"), protocol.Abort(request="aborted"), protocol.Abort(request="unknown"))
    link.send(generate("r", seed=6, max_tokens=8, assignment="second"), generate("same", seed=6, max_tokens=8))
    same = link.finished("same").tokens

    def parts() -> list[protocol.TokenChunk]:
        return [chunk for output in link.of(protocol.Output) for chunk in output.chunks if chunk.request == "r"]

    service.until(lambda: parts()[-1].finish)
    begun = max(number for number, chunk in enumerate(parts()) if chunk.offset == 0)
    assert [token for chunk in parts()[begun:] for token in chunk.tokens] == same
    service.until(lambda: (beat := link.of(protocol.Heartbeat)[-1]).active + beat.waiting == 0)


def test_a_request_that_continues_elsewhere_leaves_every_sampled_token(
    service: Dialled, start: Start, tmp_path: Path
) -> None:
    """The controller asks for it at the end of a chunk; the next worker's text is as if it had never moved."""
    start(before=held_at(2 * SOME, go := tmp_path / "go"))
    link = service.connection(0)
    link.send(generate("r", seed=6), generate("whole", seed=6))
    link.some("r", 5)
    link.send(*(protocol.Abort(request=name, resume=True) for name in ("r", "unknown")))
    service.until(lambda: link.stream("r").finish)
    first = link.stream("r")
    assert first.finish == "abort" and 5 <= len(first.tokens) < LONG
    go.touch()
    link.send(generate("elsewhere", seed=6, prefix_tokens=first.tokens))
    rest = link.finished("elsewhere")
    assert first.tokens + rest.tokens == link.finished("whole").tokens
    service.until(lambda: link.of(protocol.Heartbeat)[-1].generated >= 2 * LONG)
    beat = link.of(protocol.Heartbeat)[-1]
    assert beat.generated == 2 * LONG, "no token is sampled twice"
    assert beat.free_tokens > 0 and beat.costs["decode"]


def test_sigterm_sends_sampled_tokens_and_draining(service: Dialled, start: Start, tmp_path: Path) -> None:
    worker = start(before=held_at(SOME, tmp_path / "never"))
    service.flush_seconds = 60  # nothing leaves by itself
    link = service.connection(0)
    link.send(generate("r"))
    service.until(lambda: (b := link.of(protocol.Heartbeat)) and b[-1].generated > 10)
    assert link.stream("r").tokens == []
    worker.send_signal(signal.SIGTERM)
    service.until(lambda: link.closed)
    sampled = link.stream("r")
    assert len(sampled.tokens) > 10
    assert isinstance(link.frames[-1], protocol.Draining)
    assert ended(worker)[0] == 0


# --- training -------------------------------------------------------------------------------------------------------


def test_steps_commit_in_sequence(service: Dialled, start: Start) -> None:
    start()
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    hashes = [parent.hash]
    for version in (1, 2):
        ticket = service.tickets.upload()
        name = f"v{version}"
        link.send(
            forward(f"{name} a", parent, batch(service)),
            forward(f"{name} b", parent, batch(service, 7), operations=1),
            optim(f"{name} c", parent, operations=2),
            forward(f"{name} d", parent, batch(service), steps=1),
            optim(f"{name} e", parent, steps=1, upload=ticket),
        )
        answers = [link.done(f"{name} {letter}") for letter in "abcde"]
        assert [done.error for done in answers] == [""] * 5
        assert answers[0].metrics["tokens"] == 10
        assert answers[2].metrics["grad_norm"] > 0
        assert answers[2].manifest is None
        manifest = answers[4].manifest
        assert manifest is not None
        assert service.collect(ticket) == manifest
        service.artifacts.verify(manifest.hash)
        assert "trainer_state.safetensors" in {shard.name for shard in manifest.shards}
        parent = service.ref(manifest, version, "p")
        hashes.append(parent.hash)
        link.send(protocol.VersionCommitted(policy="p", lease=1, ref=parent))
    assert len(set(hashes)) == 3
    assert [path for path, _ in service.requests if path.endswith("trainer_state.safetensors")] == []  # never reloaded
    link.send(generate("new", parent, max_tokens=10))
    assert {chunk.version for chunk in link.finished("new").chunks} == {2}
    # another worker goes on from the committed version
    start()
    other = service.connection(1)
    other.send(forward("x", parent, batch(service), lease=2), optim("y", parent, lease=2))
    assert [other.done(op).error for op in "xy"] == ["", ""]
    link.send(forward("x", parent, batch(service), forward_only=True))
    assert len(link.done("x").logprobs) == 2 * 5 * 4


def test_no_step_follows_a_failed_operation(service: Dialled, start: Start) -> None:
    start()
    link = service.connection(0)
    parent, other = make_policy(service, link, "p"), make_policy(service, link, "other")
    link.send(
        forward("good", parent, batch(service)),
        forward("gone", parent, "no such offer", operations=1),
        optim("over", parent, operations=2),
        forward("other", other, batch(service)),
        optim("other step", other),
    )
    assert (link.done("good").error, link.done("good").category) == ("", "")
    assert link.done("gone").category == "lost"
    assert "\n" not in link.done("gone").error
    assert link.done("over").category == "stale"
    assert link.done("other step").error == ""
    nonsense = service.tickets.publish_batch(b"nonsense")
    again = {"lease": 2}
    link.send(forward("nonsense", parent, nonsense, **again), optim("over that", parent, **again))
    assert link.done("nonsense").category == "failed"
    assert link.done("over that").category == "stale"
    link.send(forward("ahead", parent, batch(service), steps=3), optim("nothing held", parent, lease=9))
    assert link.done("ahead").category == "stale"
    assert link.done("nothing held").category == "stale"
    link.send(forward("unknown loss", parent, batch(service), loss=protocol.Loss(name="none such"), **again))
    assert link.done("unknown loss").category == "failed"
    link.send(forward("second", parent, batch(service), **again), optim("second step", parent, **again))
    assert (link.done("second").error, link.done("second step").error) == ("", "")
    # an operation that is cancelled is not answered, nor is its gradient stepped with
    link.send(
        forward("cancelled", parent, batch(service), steps=1, **again),
        protocol.CancelOperation(op="cancelled"),  # before the worker can have read the batch
        optim("after", parent, steps=1, **again),
    )
    assert link.done("after").category == "stale"
    assert [done for done in link.of(protocol.OperationDone) if done.op == "cancelled"] == []


NO_ROOM = "Error while serializing: I/O error: No space left on device (os error 28)"


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "lost"),
        (SafetensorError(NO_ROOM), "lost"),
        (MemoryError(), "lost"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lost"),
        (TransferFailed("PUT: the service's disk is full"), "lost"),
        (CorruptDownload("artifact 0123 is corrupt"), "failed"),
        (UserError("the adapter to start from has rank 8, the policy asks for 4"), "failed"),
        (TooSmall("training states of rank 64 do not fit this worker"), "too small"),
        (SafetensorError("Error while serializing: unknown dtype"), "failed"),
        (RuntimeError("shapes do not match"), "failed"),
    ],
)
async def test_fault_of_the_worker_is_lost_and_fault_of_the_operation_is_failed(
    error: Exception, category: str
) -> None:
    """A failed operation ends its job; a lost one is retried by another worker."""

    class Troubled:
        async def call(self, function: Callable[..., Any], *, touches: str = "states") -> Any:
            await settle(1)
            raise error

    answers: list[tuple[str, str]] = []

    async def answer(done: protocol.OperationDone) -> None:
        answers.append((done.op, done.category))

    operations = TrainingOps(Troubled(), None, answer, answer)  # type: ignore[arg-type]
    operations.start(protocol.InitAdapter(op="i", policy="p", rank=4, alpha=8.0, targets=["q"], seed=1, upload="u"))
    await eventually(lambda: bool(answers))
    assert answers == [("i", category)]
    assert operations.failed == 1


def test_interrupted_step_starts_again(service: Dialled, start: Start) -> None:
    start()
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    link.send(forward("a", parent, batch(service)))
    assert link.done("a").error == ""
    link.drop()
    link = service.connection(1)
    link.send(optim("half", parent))
    assert link.done("half").category == "stale"
    ticket = service.tickets.upload()
    link.send(forward("b", parent, batch(service), lease=2), optim("c", parent, lease=2, upload=ticket))
    assert link.done("b").error == ""
    assert link.done("c").manifest == service.collect(ticket)


def committed(service: Dialled, link: Connection, parent: protocol.AdapterRef, lease: int) -> protocol.Manifest:
    """The version after one step, on two batches, from ``parent``."""
    ticket, name = service.tickets.upload(), f"{parent.version} under {lease}"
    link.send(
        forward(f"{name} a", parent, batch(service), lease=lease),
        forward(f"{name} b", parent, batch(service, 7), lease=lease, operations=1),
        optim(f"{name} c", parent, lease=lease, operations=2, upload=ticket),
    )
    answers = [link.done(f"{name} {letter}") for letter in "abc"]
    assert [done.error for done in answers] == [""] * 3
    manifest = service.collect(ticket)
    assert manifest == answers[-1].manifest
    return manifest


SLOW_TRAINING = """
import time
from rookery.worker.trainer.packed_trainer import PackedTrainer
optimise = PackedTrainer.optimise
def slow(self, op):
    time.sleep(600)
PackedTrainer.optimise = slow
"""
"""An optimizer step that begins and does not end before the worker is killed."""


def test_step_of_a_killed_or_moved_policy_is_that_of_one_worker(service: Dialled, start: Start) -> None:
    """Four processes: three take the same step from one commit, bit for bit: the one that made it, one to which the
    policy moves between steps, and one that repeats the step of a fourth that is killed in its middle."""
    start()
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    parent = service.ref(committed(service, link, parent, 1), 1, "p")
    link.send(protocol.VersionCommitted(policy="p", lease=1, ref=parent))
    stayed = committed(service, link, parent, 1)

    victim = start(before=SLOW_TRAINING)
    doomed = service.connection(1)
    ticket = service.tickets.upload()
    doomed.send(forward("a", parent, batch(service), lease=2), optim("b", parent, lease=2, upload=ticket))
    assert doomed.done("a").error == ""
    service.until(lambda: any(beat.training for beat in doomed.of(protocol.Heartbeat)))
    victim.send_signal(signal.SIGKILL)
    service.until(lambda: doomed.closed)

    for number, lease in ((2, 3), (3, 4)):
        start()
        assert committed(service, service.connection(number), parent, lease) == stayed


def test_worker_pulls_the_version_that_a_kl_penalty_compares_with(service: Dialled, start: Start) -> None:
    """Also after a lost connection, and on another worker: with the same sum. Version 0 itself has no penalty."""
    start()
    link = service.connection(0)
    zero = make_policy(service, link, "p")
    trained = service.ref(committed(service, link, zero, 1), 1, "p")
    sums = []
    for number in range(3):
        lease = number + 2
        link.send(
            forward("base", trained, batch(service), lease=lease, kl_weight=0.1),
            forward("start", trained, batch(service), lease=lease, operations=1, kl_weight=0.1, reference=zero),
            forward("itself", trained, batch(service), lease=lease, operations=2, kl_weight=0.1, reference=trained),
        )
        done = [link.done(op) for op in ("base", "start", "itself")]
        assert [answer.error for answer in done] == [""] * 3
        sums.append([answer.metrics["kl:sum"] for answer in done])
        if number == 0:
            link.drop()
        else:
            start()
        link = service.connection(number + 1)
    assert sums[0] == sums[1] == sums[2]
    base, of_start, of_itself = sums[0]
    assert of_start == base > 1e-4 > abs(of_itself), "B is 0 in version 0"


def test_gradient_of_a_share_is_added_on_another_worker(service: Dialled, start: Start) -> None:
    """The exported gradient and the worker's own give the step of one worker on both batches, up to rounding; the
    helper keeps no state of the policy."""
    start()
    one = service.connection(0)
    parent = make_policy(service, one, "p")
    whole = committed(service, one, parent, 1)
    start()
    two = service.connection(1)
    share, ticket = service.tickets.upload(), service.tickets.upload()
    two.send(forward("share", parent, batch(service, 7), lease=2, upload=share))
    done = two.done("share")
    assert done.error == "" and done.manifest == service.collect(share)
    assert [shard.name for shard in done.manifest.shards] == ["gradient.safetensors"]
    assert done.metrics["tokens"] == 14
    empty = service.tickets.publish_batch(protocol.encode(protocol.TrainingBatch()))
    gradient = service.ref(done.manifest, 0, "p")
    one.send(
        forward("first", parent, batch(service), lease=2),
        forward("sum", parent, empty, lease=2, operations=1, gradients=[gradient]),
        optim("step", parent, lease=2, operations=2, upload=ticket),
    )
    assert [one.done(op).error for op in ("first", "sum", "step")] == [""] * 3
    divided = service.collect(ticket)
    files = [service.artifacts.path(manifest.hash, "adapter_model.safetensors") for manifest in (whole, divided)]
    single, several = (load_file(file) for file in files)
    for name, weight in single.items():
        torch.testing.assert_close(several[name], weight, rtol=1e-4, atol=1e-5)
    two.send(optim("held", parent, lease=2))
    assert two.done("held").category == "stale"


def test_state_is_restored_without_a_transfer_after_a_lost_connection(service: Dialled, start: Start) -> None:
    """Under another lease: the connection ended the former one."""
    start()
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    ticket = service.tickets.upload()
    link.send(forward("a", parent, batch(service)), optim("b", parent, upload=ticket))
    manifest = link.done("b").manifest
    assert manifest is not None and service.collect(ticket) == manifest
    parent = service.ref(manifest, 1, "p")
    link.send(protocol.VersionCommitted(policy="p", lease=1, ref=parent), forward("c", parent, batch(service)))
    assert link.done("c").error == ""
    link.drop()
    link = service.connection(1)
    link.send(forward("d", parent, batch(service), lease=2), optim("e", parent, lease=2))
    assert [link.done(op).error for op in "de"] == ["", ""]
    assert [path for path, _ in service.requests if path.endswith("trainer_state.safetensors")] == []


def test_computation_continues_during_an_upload_and_sigterm_waits_for_it(service: Dialled, start: Start) -> None:
    worker = start(drain_seconds=str(PATIENCE_SECONDS))
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    service.uploads.clear()
    service.uploads_held = threading.Event()
    ticket = service.tickets.upload()
    link.send(forward("a", parent, batch(service)), optim("b", parent, upload=ticket))
    assert service.uploads.wait(PATIENCE_SECONDS)
    link.send(generate("r", parent, max_tokens=20), forward("c", parent, batch(service), steps=1))
    assert len(link.finished("r").tokens) == 20
    assert link.done("c").error == ""
    worker.send_signal(signal.SIGTERM)
    service.uploads_held.set()
    assert link.done("b").manifest == service.collect(ticket)
    service.until(lambda: link.closed)
    assert isinstance(link.frames[-1], protocol.Draining)
    assert ended(worker)[0] == 0


BESIDE = {"threads": "2", "lanes": "beside"}
"""Settings of a worker that trains beside decoding, where the machine allows it."""


@pytest.mark.parametrize("settings", [{}, BESIDE], ids=["turns", "beside"])
def test_sigterm_during_generation_and_training_sends_sampled_tokens(
    service: Dialled, start: Start, tmp_path: Path, settings: dict[str, str]
) -> None:
    worker = start(before=held_at(LONG + SOME, tmp_path / "never"), **settings)
    link, parent, whole = begun(service)
    service.flush_seconds = 60
    link.drop()
    link = service.connection(1)
    link.send(generate("r", parent))
    link.send(*(forward(f"f{number}", parent, batch(service, 40), operations=number) for number in range(200)))
    link.done("f0")
    service.until(lambda: (beats := link.of(protocol.Heartbeat)) and beats[-1].active == 1 and beats[-1].training > 0)
    worker.send_signal(signal.SIGTERM)
    service.until(lambda: link.closed)
    assert isinstance(link.frames[-1], protocol.Draining)
    assert ended(worker)[0] == 0
    sampled = link.stream("r")
    assert 0 < len(sampled.tokens) < LONG
    assert sampled.finish == ""
    assert sampled.tokens == whole.tokens[: len(sampled.tokens)], "handed back as far as it came"
    assert len(link.of(protocol.OperationDone)) < 200, "what it trained on is given up: who sent it sends it elsewhere"


# --- ending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "token", "says"),
    [
        (["--model", "no-such-model"], "token", "no model is called"),
        (["--roles", "rollout,cook"], "token", "--roles"),
        (["--connect", "ftp://x"], "token", "--connect"),
        ([], "wrong", "the token is wrong"),
    ],
)
def test_invalid_option_exits_with_one_line(
    service: Dialled, start: Start, arguments: list[str], token: str, says: str
) -> None:
    """The service is told the line, where the options lead to it."""
    code, said = ended(start(*arguments, token=token))
    assert code == EXIT_REFUSED
    assert says in said
    assert "Traceback" not in said
    if token == "token" and "--connect" not in arguments:
        link = service.connection(0)
        [told] = service.until(lambda: link.of(protocol.Draining))
        assert told.refused and says in told.reason and "\n" not in told.reason
    else:
        assert not service.connections


BROKEN = """
from rookery.worker.engine.native.engine import NativeEngine
step = NativeEngine.step
def broken(self):
    if self.generated > 20:
        raise RuntimeError("the arithmetic unit is on fire")
    return step(self)
NativeEngine.step = broken
"""


def test_fault_of_the_compute_thread_exits_after_sampled_tokens_are_sent(service: Dialled, start: Start) -> None:
    worker = start(before=BROKEN)
    service.flush_seconds = 60
    link = service.connection(0)
    link.send(generate("r"))
    service.until(lambda: link.closed)
    assert len(link.stream("r").tokens) > 20
    assert isinstance(link.frames[-1], protocol.Draining)
    code, said = ended(worker)
    assert code == 1
    assert "on fire" in said


LANE_BROKEN = """
import threading, time
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.trainer.operation_queue import OperationQueue
step, train = NativeEngine.step, OperationQueue.step
def lane():
    return any(thread.name == "engine" for thread in threading.enumerate())
def broken_engine(self):
    time.sleep(0.002)
    if lane():
        FAULT
    return step(self)
def broken_trainer(self):
    if lane():
        FAULT
    return train(self)
"""
RAISES = 'raise RuntimeError("the arithmetic unit is on fire")'
HALTS = "time.sleep(3600)"


MANY = 200
"""Requests, and operations."""


def train_and_generate(service: Dialled, link: Connection) -> None:
    """Work of both kinds for longer than a test."""
    parent = make_policy(service, link, "p")
    link.send(generate("r", parent))
    link.some("r", 5)
    link.send(*(generate(f"r{number}", parent) for number in range(MANY)))
    link.send(*(forward(f"f{number}", parent, batch(service, 40), operations=number) for number in range(MANY)))


needs_lanes = pytest.mark.skipif(
    not kernels.load(None) or bool(teams.why_inexact(torch.device("cpu"), COMPUTED, kernels=True)),
    reason="no lanes on this processor",
)


@needs_lanes
@pytest.mark.parametrize("part", ["engine", "trainer"])
def test_fault_in_either_lane_ends_the_worker_with_its_reason(service: Dialled, start: Start, part: str) -> None:
    owner = "NativeEngine" if part == "engine" else "OperationQueue"
    worker = start(before=f"{LANE_BROKEN.replace('FAULT', RAISES)}{owner}.step = broken_{part}", **BESIDE)
    link = service.connection(0)
    train_and_generate(service, link)
    service.until(lambda: link.closed)
    assert isinstance(link.frames[-1], protocol.Draining)
    code, said = ended(worker)
    assert code == 1 and "on fire" in said


@needs_lanes
@pytest.mark.parametrize("part", ["engine", "trainer"])
def test_a_lane_that_stands_still_shows_although_the_other_works(service: Dialled, start: Start, part: str) -> None:
    owner = "NativeEngine" if part == "engine" else "OperationQueue"
    early = "from rookery.worker import compute\ncompute.STUCK_SECONDS = 0.3\n"
    slow = SLOW_LAYERS.replace("sleep(1)", "sleep(0.5)")  # the other operations come while the first is computed
    start(before=f"{early}{slow}{LANE_BROKEN.replace('FAULT', HALTS)}{owner}.step = broken_{part}", **BESIDE)
    link = service.connection(0)
    train_and_generate(service, link)

    def work(beat: protocol.Heartbeat) -> float:
        """Of the part that does not stand still."""
        return beat.train_seconds if part == "engine" else beat.generated

    def stands_still() -> bool:
        beats = link.of(protocol.Heartbeat)[-4:]
        busy = len(beats) == 4 and all(
            beat.lanes.startswith("beside") and beat.active and beat.training for beat in beats
        )
        return busy and len({beat.progress for beat in beats}) == 1 and work(beats[0]) < work(beats[-1])

    service.until(stands_still)


@needs_lanes
def test_requests_and_operations_end_by_cancellation_in_both_lanes(service: Dialled, start: Start) -> None:
    start(before=SLOW, **BESIDE)
    link = service.connection(0)
    train_and_generate(service, link)
    service.until(lambda: link.of(protocol.Heartbeat)[-1].lanes.startswith("beside"))
    link.send(
        *(protocol.Abort(request=name) for name in ("r", *(f"r{number}" for number in range(MANY)))),
        *(protocol.CancelOperation(op=f"f{number}") for number in range(MANY)),
    )
    service.until(lambda: (beat := link.of(protocol.Heartbeat)[-1]).active + beat.waiting + beat.training == 0)
    link.send(generate("again", max_tokens=8))
    assert len(link.finished("again").tokens) == 8
    service.until(lambda: link.of(protocol.Heartbeat)[-1].lanes.startswith("turns: "))


ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"


@needs_lanes
@pytest.mark.parametrize("lanes", ["auto", "beside"])
def test_a_worker_on_one_core_takes_turns_with_this_reason(service: Dialled, start: Start, lanes: str) -> None:
    start(before=ONE_CORE, threads="0", lanes=lanes)
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    link.send(generate("r", parent, max_tokens=100), forward("f", parent, batch(service)))
    link.done("f")
    assert len(link.finished("r").tokens) == 100
    reason = "turns: the worker computes with one core"
    service.until(lambda: (beats := link.of(protocol.Heartbeat)) and beats[-1].lanes == reason)
    assert {beat.lanes for beat in link.of(protocol.Heartbeat)} <= {"", reason}


def test_pulled_bytes_are_progress_only_while_nothing_computes() -> None:
    """Adapters keep arriving while a slice is stuck."""
    idle = msgspec.structs.replace(IDLE, progress=7)
    assert progress(idle, 100) != progress(idle, 200)
    for busy in ({"active": 1}, {"waiting": 1}, {"training": 1}):
        hangs = msgspec.structs.replace(idle, **busy)
        assert progress(hangs, 100) == progress(hangs, 200)


HANGS = """
import time
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.trainer.operation_queue import OperationQueue
NativeEngine.step = OperationQueue.step = lambda self: time.sleep(3600)
"""


@pytest.mark.parametrize("part", ["engine", "trainer"])
def test_stuck_first_slice_shows_as_work_without_progress(service: Dialled, start: Start, part: str) -> None:
    """Otherwise an idle worker's first slice could be stuck unnoticed: an idle worker makes no progress."""
    start(before=HANGS)
    link = service.connection(0)
    parent = make_policy(service, link, "p")  # calls alone
    link.send(generate("r") if part == "engine" else forward("a", parent, batch(service)))

    def busy() -> list[bool]:
        return [beat.active + beat.waiting + beat.training > 0 for beat in link.of(protocol.Heartbeat)]

    service.until(lambda: len(busy()) >= 10 and all(busy()[-5:]))  # to the end, not while its adapter came
    assert {beat.progress for beat in link.of(protocol.Heartbeat)[-5:]} == {link.of(protocol.Heartbeat)[-1].progress}


SLOW_LAYERS = """
import time
from rookery.worker.trainer.native.kernel_pass import KernelPass
gradient = KernelPass._layer_gradient
KernelPass._layer_gradient = lambda *arguments: time.sleep(1) or gradient(*arguments)
"""


@pytest.mark.skipif(not kernels.load(None), reason="no kernels")
def test_chats_are_answered_between_the_layers_of_a_training_slice(service: Dialled, start: Start) -> None:
    """One that comes while another is late, too."""
    start(before=SLOW.replace("0.005", "0.01") + SLOW_LAYERS.replace("sleep(1)", "sleep(2)"))
    link = service.connection(0)
    parent = make_policy(service, link, "p")
    link.send(forward("f", parent, batch(service)))
    service.until(lambda: link.of(protocol.Heartbeat)[-1].training == 1)
    for chat in ("late", "second"):
        link.send(generate(chat, client=True, reserved=True, ttft_ms=500.0, tpot_ms=0.01))
        link.some(chat, 1)
        assert not link.stream("late").finish and not link.of(protocol.OperationDone)[1:]
    assert link.done("f").error == "" and len(link.finished("second").tokens) == LONG


def test_worker_ends_with_its_parent(service: Dialled, start: Start) -> None:
    worker = start("--die-with-parent")
    service.connection(0)
    worker.stdin.close()
    assert worker.wait(PATIENCE_SECONDS) != 0
