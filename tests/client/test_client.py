"""The Python SDK against a real service with a scripted worker: hosting, following, fetching results, one-line
errors."""

from __future__ import annotations

import asyncio
import copy
import io
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.faces import MODEL, Reach, ThreadedWorker, adapter_files, job, served
from tests.support.ports import free_port
from tests.support.waiting import until

import rookery
from rookery.client import Client, Job, JobTimeout, Record, RequestRefused
from rookery.client.client import pieces
from rookery.client.connection import ConnectionBroken, HttpConnection, WaitingClock
from rookery.client.job import RECONNECT_SECONDS
from rookery.errors import Conflict, NotFound, RookeryError, Unauthorized, Unavailable, UserError
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.spec import values


class Adder(rookery.Environment):
    """As in the documentation: asynchronous, one turn."""

    def prompts(self, split: str) -> list[dict[str, int]]:
        return [{"a": a, "b": 4 - a} for a in range(4)]

    async def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{prompt['a']} + {prompt['b']} = ?"}]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        right = reply.text.strip() == str(self.prompt["a"] + self.prompt["b"])
        return rookery.Step(reward=float(right), done=True, metrics={"right": float(right)})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    root = tmp_path_factory.mktemp("client")
    with served(root) as running, ThreadedWorker.of(running):
        yield running


@pytest.fixture
def client(service: EmbeddedService) -> Iterator[Client]:
    with Client(service.url, service.key) as made:
        yield made


PARTS: dict[str, Any] = {
    "policies": {"main": {"rank": 4, "targets": ["q"]}},
    "algorithm": {"group_size": 2, "groups_per_step": 2},
}


def hosts() -> set[threading.Thread]:
    """The threads of environment hosts in this process, also of other tests'."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("environment")}


def test_user_environment_trains_a_job(client: Client, tmp_path: Path) -> None:
    before = hosts()
    trained = client.train(base_model=MODEL, environment=Adder(), stop={"steps": 2}, **PARTS)
    assert trained.name == "adder"
    rows = list(trained.metrics())
    assert [row.step for row in rows] == [1, 2] and 0 <= rows[0].reward <= 1
    assert trained.wait(timeout=30).state == "completed"
    assert [row.step for row in trained.metrics(after=1, follow=False)] == [2]
    assert [version.version for version in trained.versions()] == [0, 1, 2]
    folder = trained.adapter().download(tmp_path / "adapter")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == adapter_files(float(_trainer_step(folder)))
    assert (trained.adapter(0).download(tmp_path / "zero") / "adapter_model.safetensors").exists()
    reply = trained.sample("2 + 2 = ?", seed=2, max_tokens=8)
    assert reply.text == "4" and reply.version == 2
    assert trained.sample("2 + 2 = ?", version=1, seed=2).version == 1
    assert trained.trajectories(limit=1)[0].reward in (0.0, 1.0)
    assert trained.evaluations() == [] and trained.events()
    assert hosts() <= before


def test_adapter_and_versions_are_by_default_of_the_first_policy_that_trains(client: Client, tmp_path: Path) -> None:
    solver = PARTS["policies"]["main"]
    trained = client.submit(job(policies={"solver": solver, "judge": {"train": False, "base": True}}))
    assert trained.wait().state == "completed"
    assert [version.version for version in trained.versions()] == [0, 1, 2]
    folder = trained.adapter().download(tmp_path / "adapter")
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(NotFound):
        trained.versions("main")


def _trainer_step(folder: Path) -> float:
    from safetensors.numpy import load_file

    weights = load_file(folder / "adapter_model.safetensors")
    return float(next(iter(weights.values())).flat[0])


def test_environment_class_with_options_is_accepted(client: Client) -> None:
    wanted = {"hosted": Adder, "max_turns": 3}
    first = client.train(base_model=MODEL, environment=wanted, name="twice", stop={"steps": 1}, **PARTS)
    second = client.train(base_model=MODEL, environment=Adder(), name="twice", stop={"steps": 1}, **PARTS)
    assert first.show().spec.environment.max_turns == 3
    hosted = {job.show().spec.environment.hosted for job in (first, second)}
    assert len(hosted) == 2 and all(name.startswith("twice-") for name in hosted)
    assert first.wait(30).state == second.wait(30).state == "completed"
    assert client.job("twice").id == second.id and client.job("twice~1").id == first.id
    assert client.job(first.id).id == first.id and first.id in [job.id for job in client.jobs()]


def test_an_object_that_is_no_environment_is_refused_with_a_remedy(client: Client) -> None:
    class Mine:
        """Has all methods, and derives from nothing."""

        def prompts(self, split: str) -> list[int]:
            return [1]

    wrongs: list[Any] = [Mine, Mine(), {"hosted": Mine()}, {"hosted": Mine}]
    for wrong in wrongs:
        with pytest.raises(UserError, match=r"the class Mine does not .* write class Mine\(rookery.Environment\)"):
            client.train(base_model=MODEL, environment=wrong, stop={"steps": 1})
    for wrong in wrongs[:2]:
        with pytest.raises(UserError, match="does not derive"):
            client.host("mine", wrong)
    number: Any = 3
    with pytest.raises(UserError, match=r"given 3; give a rookery.Environment"):
        client.train(base_model=MODEL, environment=number, stop={"steps": 1})
    for name in ("jsonl", "mine"):  # a text alone does not say which of the two it names
        with pytest.raises(UserError, match=rf'give {{"id": "{name}"}} .* {{"hosted": "{name}"}}'):
            client.train(base_model=MODEL, environment=name, stop={"steps": 1})  # type: ignore[arg-type]
    for nothing in (None, {"hosted": 5}, {"hosted": None, "id": 5}):
        with pytest.raises(UserError):
            client.train(base_model=MODEL, environment=nothing, stop={"steps": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [5, None, "", " ", "builtin:x", "x" * 201, "\ud800"])
def test_names_that_no_host_can_offer_are_refused(client: Client, name: Any) -> None:
    before = hosts()
    with pytest.raises(UserError, match=r"^name: given"):
        client.host(name, Adder)
    with pytest.raises(UserError, match="environment"):
        client.submit(job(environment={"hosted": name}))
    assert hosts() <= before


def test_a_dry_run_shows_every_default_and_can_be_submitted(client: Client) -> None:
    plan = client.dry_run(job(algorithm={"group_size": 2, "groups_per_step": 2, "loss": "ppo"}))
    assert plan.spec.algorithm.loss == {"name": "ppo", "clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert plan.spec.environment.verifier.name == "exact" and len(plan.spec.environment.verifier) > 1
    assert plan.spec.environment.eval_last == 0
    assert client.dry_run(plan.spec).spec == plan.spec
    calculator = client.dry_run(job(environment={"id": "calculator"})).spec.environment
    assert len(calculator) > 6, "the options of the built-in are there"


def test_environment_can_be_served_again_for_a_job_whose_process_ended(
    client: Client, service: EmbeddedService
) -> None:
    """The first client closes before its job has its prompts; a second client serves the environment by its name."""
    steps = {**PARTS, "stop": {"steps": 2}}
    with Client(service.url, service.key) as first:
        left = first.train(base_model=MODEL, environment={"hosted": Adder(), "return_timeout": 30}, **steps)
        name = left.show().spec.environment.hosted
    client.host(name, Adder)
    with pytest.raises(RookeryError, match="already offers"):
        client.host(name, Adder)
    assert client.job(left.id).wait(timeout=60).state == "completed"


class HeldAdder(Adder):
    """Its steps wait for :attr:`go`, but for those of a first training step."""

    begun: ClassVar[Iterator[int]] = itertools.count(1)
    go: ClassVar[threading.Event] = threading.Event()

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        if next(self.begun) > PARTS["algorithm"]["group_size"] * PARTS["algorithm"]["groups_per_step"]:
            while not self.go.is_set():  # noqa: ASYNC110  # another thread sets it
                await asyncio.sleep(0.01)
        return await super().step(reply)


def test_a_program_that_is_started_again_continues_its_job(service: EmbeddedService) -> None:
    parts = {**PARTS, "algorithm": {**PARTS["algorithm"], "max_staleness": 0}}
    wanted: dict[str, Any] = {"base_model": MODEL, "environment": HeldAdder, "name": "again", **parts}
    with Client(service.url, service.key) as first:
        begun = first.train(stop={"steps": 6}, **wanted)
        assert next(begun.metrics()).step == 1
        with Client(service.url, service.key) as other:
            beside = other.train(stop={"steps": 6}, **wanted)
            assert beside.id != begun.id, "the first program still runs"
            beside.cancel()
    with Client(service.url, service.key) as second:
        until(lambda: not second.job(begun.id).show().hosted, "the service did not notice the first program's end")
        with pytest.raises(Conflict, match=r"differs in stop; give new=True"):
            second.train(stop={"steps": 7}, **wanted)
        with pytest.raises(Conflict, match=r"differs in base_model; give new=True"):
            second.train(stop={"steps": 6}, **{**wanted, "base_model": "qwen3-1.7b"})
        wanted["base_model"] = "Qwen/Qwen3-0.6B"  # the same model
        HeldAdder.go.set()
        another = second.train(new=True, stop={"steps": 1}, **wanted)
        assert another.id != begun.id and another.wait(60).state == "completed"
        continued = second.train(stop={"steps": 6}, **wanted)
        assert continued.id == begun.id
        assert continued.wait(60).state == "completed"
        assert [row.step for row in continued.metrics(follow=False)] == [1, 2, 3, 4, 5, 6]
        assert second.train(stop={"steps": 6}, **wanted).id != begun.id, "a job that has ended is not continued"


SAME_MODEL = {"main": {"rank": 4, "targets": ["q"], "base_model": "Qwen/Qwen3-0.6B"}}


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({}, []),
        ({"base_model": "Qwen/Qwen3-0.6B"}, []),
        ({"environment": {**job()["environment"], "verifier": {"name": "exact"}}}, []),
        ({"algorithm": {**PARTS["algorithm"], "loss": "ppo"}}, ["algorithm"]),
        ({"base_model": "qwen3-1.7b"}, ["base_model"]),
        ({"environment": {**job()["environment"], "rows": job()["environment"]["rows"][:5]}}, ["environment"]),
        ({"stop": {"steps": 3}, "seed": 1}, ["stop", "seed"]),
        ({"stop": {"epochs": 2}}, ["stop"]),
        ({"policies": SAME_MODEL}, ["policies"]),
    ],
)
def test_differences_of_jobs_are_those_of_their_runs(
    client: Client, changes: dict[str, Any], differing: list[str]
) -> None:
    first = client.submit(job(name="first"))
    first.cancel()
    assert client.differences(first.id, job(name="first", **changes)) == differing
    again = client.submit(job(name="first", **changes))
    again.cancel()
    assert client.differences(again.id, job(name="first", **changes)) == []


def test_files_that_a_job_names_are_uploaded(client: Client, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+3?", "answer": "4"}\n')
    (tmp_path / "peft").mkdir()
    for name, content in adapter_files(1.0).items():  # symbolic links, as in the hub's cache
        (tmp_path / f"blob-{name}").write_bytes(content)
        (tmp_path / "peft" / name).symlink_to(tmp_path / f"blob-{name}")
    environment = {"id": "jsonl", "path": "rows.jsonl", "eval_path": "held.jsonl", "verifier": "exact"}
    policies = {"main": {"rank": 4, "targets": ["q"], "warm_start": {"peft": str(tmp_path / "peft")}}}
    spec = job(name="files", environment=environment, policies=policies, stop={"steps": 1}, evaluation={"prompts": 1})
    plan = client.dry_run(spec, folder=tmp_path)
    assert plan.prompts[0].messages[0].content == "2+2?"
    submitted = client.submit(spec, folder=tmp_path)
    assert submitted.wait(30).state == "completed"
    assert [row.version for row in submitted.evaluations()] == [0, 1]
    assert spec["environment"]["path"] == "rows.jsonl"
    with pytest.raises(RookeryError, match=r"nothing\.jsonl cannot be read"):
        client.submit(job(environment={**environment, "path": "nothing.jsonl"}), folder=tmp_path)


UNREADABLE = [
    (b'{"prompt": "a"', "line 1 is not JSON"),
    (b"{\xfa}", "line 1 is not UTF-8; save the file as UTF-8"),
    (b"", "no rows; write one JSON object per line"),
    (b"PK\x03\x04", "it is "),
    (None, "cannot be read (No such file or directory); give a JSONL file"),
]
"""A file of rows, None for none, and the mistake in it."""


@pytest.mark.parametrize("option", ["path", "eval_path"])
@pytest.mark.parametrize(("content", "mistake"), UNREADABLE, ids=[mistake[:16] for _, mistake in UNREADABLE])
def test_an_unreadable_file_of_rows_is_named_with_its_option_and_mistake(
    client: Client, tmp_path: Path, option: str, content: bytes | None, mistake: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "2+2?", "answer": "4"}\n')
    if content is not None:
        (tmp_path / "bad.jsonl").write_bytes(content)
    environment = {"id": "jsonl", "path": "rows.jsonl", "verifier": "exact", option: "bad.jsonl"}
    with pytest.raises(UserError) as refused:
        client.dry_run(job(environment=environment), folder=tmp_path)
    text = str(refused.value)
    assert f"environment.{option}: {tmp_path / 'bad.jsonl'}" in text and mistake in text and "\n" not in text


def test_an_address_without_a_machine_is_not_a_service_that_is_down() -> None:
    with pytest.raises(Unavailable, match=r"no machine has the name in http://nothing\.invalid; correct ROOKERY_URL"):
        Client("http://nothing.invalid", "tml-x").health()


def test_rows_come_from_any_file_that_can_be_read(client: Client, tmp_path: Path) -> None:
    row = b'{"prompt": "2+2?", "answer": "4"}\n'
    os.mkfifo(pipe := tmp_path / "pipe")
    (whole := tmp_path / "whole").write_bytes(row)
    spec = job(environment={"id": "jsonl", "verifier": "exact"})

    def prompt(path: Path) -> Any:
        environment = {**spec["environment"], "path": str(path)}
        return client.dry_run({**spec, "environment": environment}).prompts[0].messages[0].content

    writer = threading.Thread(target=pipe.write_bytes, args=(row * 20_000,))
    writer.start()
    assert prompt(pipe) == prompt(whole) == "2+2?"
    writer.join()
    for path, line in (("/proc/cpuinfo", "line 1 is not JSON"), ("/dev/zero", "is a device"), ("/dev/null", "device")):
        with pytest.raises(UserError, match=line):
            prompt(Path(path))
    for size in (len(row) - 1, len(row) + 1):
        with pytest.raises(UserError, match="whole changed while it was sent"):
            list(pieces(io.BytesIO(row), str(whole), size))
    for size in (len(row), None):
        assert b"".join(pieces(io.BytesIO(row), str(whole), size)) == row


def test_large_rows_are_uploaded_and_small_ones_are_part_of_the_job(client: Client) -> None:
    """A job of eight megabytes fits into a request of one."""
    large = [{"prompt": f"{number} " + "x" * 400, "answer": "é"} for number in range(20_000)]
    small = [{"prompt": f"{number}?", "answer": "1"} for number in range(3)]
    environment = {"id": "jsonl", "rows": large, "eval_rows": small, "verifier": "exact"}
    shown = client.dry_run(job(environment=environment))
    assert shown.prompts[0].messages[0].content.endswith("x" * 400)
    stored = {row.hash: row.size for row in client.uploads()}
    for field, rows in (("dataset", large), ("eval_dataset", small)):
        content = b"".join(values.encode(row) + b"\n" for row in rows)
        assert stored[shown.spec["environment"][field]] == len(content)
    wrong = [*large, {"prompt": "?", "answer": math.nan}]
    with pytest.raises(UserError, match=r"environment\.rows\.20000\.answer: given NaN"):
        client.dry_run(job(environment={**environment, "rows": wrong}))


def test_submitting_twice_with_one_key_creates_one_job(client: Client) -> None:
    spec = job(name="once", stop={"steps": 1})
    assert client.submit(spec, key="once").id == client.submit(spec, key="once").id
    assert client.submit(spec).id != client.submit(spec).id


def test_texts_with_unicode_line_separators_do_not_break_the_stream(client: Client) -> None:
    """JSON keeps them inside a string; only a newline ends a line of the stream."""
    text = "\u2028line\u2029paragraph\x85next"
    submitted = client.submit(job(name="lines", sampling={"stop": [text]}, stop={"steps": 1}))
    said = list(submitted.follow())
    assert [kind for kind, _ in said if kind in ("metrics", "end")] == ["metrics", "end"]
    assert {data.spec.sampling.stop[0] for kind, data in said if kind == "job"} == {text}


@pytest.mark.parametrize("data", [b'{"step": 1', b'{"text": "\xff"}'], ids=["cut off", "no UTF-8"])
def test_event_that_is_not_json_is_a_broken_connection(data: bytes) -> None:
    class Events(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b'event: metrics\ndata: {"step": 0}\n\ndata: %b\n\n' % data)

        def log_message(self, *about: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Events) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        connection = HttpConnection(f"http://127.0.0.1:{server.server_port}", None)
        events = connection.stream("/")
        assert next(events) == ("metrics", {"step": 0})
        with pytest.raises(ConnectionBroken, match=r"try again$"):
            next(events)
        connection.close()


def test_pause_resume_cancel_and_wait(client: Client) -> None:
    stuck = client.submit(job(name="stuck", environment={"hosted": "nobody"}))
    for seconds in (0, 0.1):
        with pytest.raises(JobTimeout, match="it continues"):
            stuck.wait(timeout=seconds)
    assert stuck.pause().state == "paused"
    assert stuck.resume().state in ("queued", "running")
    assert stuck.cancel().state == "cancelled"
    for timeout in (0, 1e-9, 10, math.inf, None):
        assert stuck.wait(timeout).state == "cancelled" and list(stuck.metrics()) == []
    for wrong in (math.nan, "5"):
        with pytest.raises(UserError, match="timeout: given"):
            stuck.wait(wrong)  # type: ignore[arg-type]


def test_refused_submit_raises_one_line_and_hosts_nothing(client: Client) -> None:
    before = hosts()
    with pytest.raises(RequestRefused) as caught:
        client.train(base_model=MODEL, environment=Adder(), stop={}, algorithm={"groupsize": 2})
    assert len(caught.value.problems) == 2 and "algorithm.groupsize" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hosts() <= before
    with pytest.raises(NotFound, match="no job"):
        client.job("nothing")
    with pytest.raises(NotFound):
        client.sample("nothing", "hello")
    with pytest.raises(AttributeError, match="there is step"):
        _ = Record(step=1).reward


def test_a_figure_that_there_is_not_is_a_dash() -> None:
    nan, name = float("nan"), "reward/a"
    row = Record(
        {"mean": 0.12345, "stderr": None, "loss": nan, "kl": -nan, "ratio": float("inf"), "kept": True, "n": 3}
    )
    row[name] = 2.0
    assert [row.figure(one) for one in row] == ["0.123", "–", "–", "–", "–", "–", "3.000", "2.000"]
    assert (row.figure("mean", ".0%"), row.figure("missing"), row.figure("n", "d")) == ("12%", "–", "3")


def test_service_and_key_are_found_from_settings_and_variables(
    service: EmbeddedService, tmp_path: Path, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(service.settings.data)
    with Client(settings=Settings.load({}, url=service.url, data=data)) as found:
        assert found.views() is not None
    reach(service)
    with rookery.Client() as found:
        assert found.models()
    monkeypatch.setenv("ROOKERY_KEY", f"{service.key}\n")  # as read from a file
    with rookery.Client() as found:
        assert found.models()
    with Client(service.url, "tml-wrong") as wrong, pytest.raises(Unauthorized):
        wrong.jobs()
    with pytest.raises(Unauthorized, match="ROOKERY_KEY"):
        Client(settings=Settings.load({}, url=service.url, data=tmp_path))
    with pytest.raises(Unavailable, match="rookery serve"):
        Client(settings=Settings.load({}, url="http://127.0.0.1:9", data=tmp_path))


def test_key_that_is_not_a_valid_header_is_refused_and_not_shown(service: EmbeddedService) -> None:
    with Client(service.url, f"{service.key}\nmore") as broken:
        for ask in (broken.jobs, lambda: list(broken.stream(MODEL, "2+2?"))):
            with pytest.raises(UserError, match="ROOKERY_KEY") as caught:
                ask()
            assert service.key not in str(caught.value) and "\n" not in str(caught.value)


class Clock(WaitingClock):
    """Time that passes while a client sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_following_continues_after_every_answer_of_an_absent_service() -> None:
    """Of a standby, a service without its database, a limit of requests, and a load balancer, in any order."""
    json, html, events = "application/json", "text/html", "text/event-stream"
    answers = [
        (200, events, b'event: job\ndata: {"state": "running"}\n\n'),
        (503, json, b'{"error": "this service is a standby: another one has the database"}'),
        (429, json, b'{"error": "8 requests of yours are open; end some first"}'),
        (507, json, b'{"error": "the disk is full"}'),
        (502, html, b"<h1>Bad Gateway</h1>"),
        (503, html, b"<h1>Service Temporarily Unavailable</h1>"),
        (504, html, b""),
        (200, html, b"<h1>Maintenance</h1>"),
        (200, events, b'event: end\ndata: {"state": "completed"}\n\n'),
    ]
    left = [*answers]

    class Away(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = left.pop(0)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *about: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Away) as server:
        threading.Thread(target=lambda: [server.handle_request() for _ in answers], daemon=True).start()
        connection = HttpConnection(f"http://127.0.0.1:{server.server_port}", None, clock=Clock())
        seen = [kind for kind, _ in Job(connection, "job-1", "sums").follow()]
        connection.close()
    assert seen == ["job", "end"] and not left


class Away(HttpConnection):
    """A connection whose streams answer as ``streams`` says, one after the other; after the last one none answers."""

    def __init__(self, clock: Clock, *streams: Iterator[tuple[str, Record]]) -> None:
        super().__init__("http://127.0.0.1:1", None, clock=clock)
        self.streams, self.attempts = [*streams], 0

    def stream(self, path: str, method: str = "GET", **request: Any) -> Iterator[tuple[str, Record]]:
        self.attempts += 1
        if not self.streams:
            raise Unavailable("no Rookery service answers")
        yield from self.streams.pop(0)


def row(step: int) -> tuple[str, Record]:
    return "metrics", Record(step=step)


def cut(*events: tuple[str, Record]) -> Iterator[tuple[str, Record]]:
    """A stream that breaks after these events."""
    yield from events
    raise Unavailable("the connection broke")


def test_the_time_that_a_caller_works_on_a_row_is_no_absence_of_the_service() -> None:
    clock, end = Clock(), ("end", Record(state="completed"))
    connection = Away(clock, cut(row(1)), cut(row(2)), iter([row(3)]), iter([end]))
    seen = []
    for step in Job(connection, "job-1", "sums").metrics():
        seen.append(step.step)
        clock.now += 500
    assert seen == [1, 2, 3] and connection.attempts == 4


def test_a_service_that_stays_away_ends_following() -> None:
    """Also one whose streams end at once without an event."""
    clock = Clock()
    for connection in (Away(clock), Away(clock, *(iter(()) for _ in range(1000)))):
        began = clock.now
        with pytest.raises(Unavailable):
            list(Job(connection, "job-1", "sums").follow())
        assert RECONNECT_SECONDS < clock.now - began < RECONNECT_SECONDS + 40


@pytest.mark.parametrize("timeout", [0, 5, 100])
def test_waiting_ends_in_time_while_the_service_is_away(timeout: float) -> None:
    clock = Clock()
    connection = Away(clock)
    with pytest.raises(JobTimeout, match=f"after {timeout} s: no Rookery service answers"):
        Job(connection, "job-1", "sums").wait(timeout)
    assert clock.now == 1000 + timeout and (timeout or connection.attempts == 1)


def test_following_names_its_last_row_and_reports_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(step: int, time: float) -> bytes:
        return b'event: metrics\ndata: {"step": %d, "time": %f, "reward": %d}\n\n' % (step, time, time)

    answers = [
        row(1, 1.5) + row(2, 2.5) + row(3, 3.5),
        b'event: rollback\ndata: {"step": 1}\n\n' + row(2, 4.5),
        row(3, 5.5) + b'event: end\ndata: {"state": "completed"}\n\n',
    ]
    asked: list[tuple[str, str | None]] = []

    class Rolling(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            stream = "stream" in self.path
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.end_headers()
            if stream:
                asked.append((self.path.partition("?")[2], self.headers["Last-Event-ID"]))
                self.wfile.write(answers[len(asked) - 1])
            else:
                self.wfile.write(b"[]" if "evaluations" in self.path else b'{"created": 1.0}')

        def log_message(self, *about: object) -> None:
            pass

    written: list[tuple[int, bool]] = []

    def written_event(time: float, step: int = 0, *values: object, restart: bool = False, **more: object) -> bytes:
        written.append((step, restart))
        return b""

    monkeypatch.setattr("rookery.client.job.event", written_event)
    with HTTPServer(("127.0.0.1", 0), Rolling) as server:
        threading.Thread(target=lambda: [server.handle_request() for _ in range(5)], daemon=True).start()
        connection = HttpConnection(f"http://127.0.0.1:{server.server_port}", None, clock=Clock())
        Job(connection, "job-1", "sums").write_tensorboard(tmp_path, follow=True)
        connection.close()
    assert asked == [("after=-1", None), ("after=3", "3@3.5"), ("after=2", "2@4.5")]
    assert written == [(0, False), (1, False), (2, False), (3, False), (2, True), (2, False), (3, False)]


def test_following_resumes_after_the_service_restarts(tmp_path: Path) -> None:
    port = free_port()
    with served(tmp_path, port=port) as first:
        client = Client(first.url, first.key)
        followed = client.submit(job())
        seen: list[str] = []
        begun = threading.Event()

        def follow() -> None:
            for kind, data in followed.follow():
                seen.append(f"{kind} {data.get('step', '')}")
                begun.set()

        reader = threading.Thread(target=follow)
        reader.start()
        assert begun.wait(30)
    with served(tmp_path, port=port) as second, ThreadedWorker.of(second):
        reader.join(60)
        assert not reader.is_alive()
    client.close()
    assert [entry for entry in seen if entry.startswith("metrics")] == ["metrics 1", "metrics 2"]
    assert seen[-1].startswith("end")


OTHER_PATHS = ("", ".", "..", "a/b", "x/../y", "/", "..\\x", "\udcff")
"""Texts that lead to another path of the service, or to none."""


@pytest.mark.parametrize("text", OTHER_PATHS)
def test_ids_that_lead_to_another_path_name_nothing(client: Client, service: EmbeddedService, text: str) -> None:
    """``..`` in the place of a key deleted its tenant: httpx resolves dots, and the service decodes slashes."""
    tenant = client.add_tenant(f"victim-{OTHER_PATHS.index(text)}")
    client.add_key(tenant.id)
    made = client.submit({**job(), "name": f"kept-{OTHER_PATHS.index(text)}"})
    calls: list[Callable[[], Any]] = [
        lambda: client.revoke_key(tenant.id, text),
        lambda: client.job(text),
        lambda: client.delete_upload(text),
        lambda: client.set_secret(text, "x"),
        lambda: client.delete_secret(text),
        lambda: client.keys(text),
        lambda: made.episode(text),
        lambda: made.versions(text),
        lambda: made.adapter(policy=text),
    ]
    for call in calls:
        with pytest.raises(NotFound, match=r"^no \w+ '"):
            call()
    assert tenant.id in [row.id for row in client.tenants()] and len(client.keys(tenant.id)) == 1
    assert client.job(made.id).show().name == made.name
    made.cancel()


@pytest.mark.parametrize(
    "given",
    [
        {"environment": {"id": "jsonl", "path": "~nobody-of-this-name/rows.jsonl", "verifier": "exact"}},
        {"environment": {"id": "jsonl", "path": "a\0b", "verifier": "exact"}},
        {"policies": {"main": {"warm_start": {"peft": "~nobody-of-this-name/x"}}}},
        {"name": "\udcff"},
        {"seed": math.inf},
        {"environment": {"id": "jsonl", "rows": (row for row in ()), "verifier": "exact"}},
        {"environment": {"id": "jsonl", "rows": [], "verifier": threading.Lock()}},
    ],
)
def test_texts_that_are_no_path_and_values_that_are_no_json_are_refused(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        client.dry_run({**job(), **given})
    assert "\n" not in str(refused.value)


def test_values_of_wrong_kinds_are_refused_with_one_line(client: Client, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.submit("job.yaml"),  # type: ignore[arg-type]
        lambda: client.submit(tmp_path / "job.yaml"),  # type: ignore[arg-type]
        lambda: client.sample("x", "hello", max_tokens=Decimal(8)),
    ]
    for call in calls:
        with pytest.raises(UserError, match=r"a job is a mapping; given \w+: read|cannot be written: .*Decimal"):
            call()


def test_a_submitted_job_is_left_as_it_was(client: Client, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 3)
    spec = job(environment={"id": "jsonl", "path": "rows.jsonl", "verifier": "exact"})
    before = copy.deepcopy(spec)
    client.dry_run(spec, folder=tmp_path)
    assert spec == before


def test_a_whole_model_is_no_adapter(client: Client) -> None:
    full = client.submit(job(name="whole", policies={"main": {"full": True, "optimizer": {"lr": 1e-5}}}))
    with pytest.raises(UserError, match="its version is a whole model, no adapter; rookery adapters download"):
        full.adapter().push("acme/whole")
    full.cancel()
