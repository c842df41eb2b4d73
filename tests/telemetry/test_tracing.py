"""Traces of episodes, against a real OTLP/HTTP receiver on the loopback interface."""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.faces import ThreadedWorker, job, served
from tests.support.waiting import until

from rookery.client import Client
from rookery.telemetry.tracing import EpisodeTracer, SendingRules, TracedCall, trace_id


class Receiver(ThreadingHTTPServer):
    """Keeps every span that it is sent; refuses them while ``status`` says so."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if receiver.status == 200:
                    sent = ExportTraceServiceRequest.FromString(body)
                    receiver.paths.add(self.path)
                    for of_resource in sent.resource_spans:
                        for scope in of_resource.scope_spans:
                            receiver.spans += scope.spans
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_each_episode_of_a_job_is_a_trace_with_its_requests(receiver: Receiver, tmp_path: Path) -> None:
    with (
        served(tmp_path, otlp_url=receiver.url) as service,
        ThreadedWorker.of(service),
        Client(service.url, service.key) as client,
    ):
        done = client.submit(job(name="traced", stop={"steps": 2}))
        view = done.wait()
        assert view.state == "completed"
        episodes = [row.episode for row in done.episodes(limit=100)]
        roots = until(
            lambda: [s for s in receiver.spans if s.name == "episode"][len(episodes) - 1 :] and receiver.spans
        )
    assert roots is not None and receiver.paths == {"/v1/traces"}
    by_trace: dict[bytes, list[Any]] = {}
    for span in receiver.spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    assert {trace_id(episode).to_bytes(16) for episode in episodes} <= by_trace.keys()
    for episode in episodes:
        spans = by_trace[trace_id(episode).to_bytes(16)]
        [root] = [span for span in spans if span.name == "episode"]
        found = attributes(root)
        assert (found["rookery.episode"], found["rookery.job"]) == (episode, done.id) and "rookery.reward" in found
        requests = [span for span in spans if span.name == "request"]
        assert len(requests) == 1 and requests[0].parent_span_id == root.span_id
        assert attributes(requests[0])["gen_ai.usage.output_tokens"] > 0
        inside = {span.name for span in spans if span.parent_span_id == requests[0].span_id}
        assert inside == {"queue", "generation"}
        assert {"environment reset", "environment step 0"} <= {span.name for span in spans}
        for span in spans:
            slack = 5_000_000  # nanoseconds between two readings of the clock
            assert root.start_time_unix_nano - slack <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano + slack


def test_failed_episode_has_its_error(receiver: Receiver) -> None:
    tracer = EpisodeTracer(f"{receiver.url}/v1/traces")
    tracer.episode("e", 10.0, 12.5, {"rookery.job": "j"}, [TracedCall("request", 11.0, 12.0)], "no context left")
    tracer.close(10.0)
    root = next(span for span in receiver.spans if span.name == "episode")
    assert (root.status.code, root.status.message) == (2, "no context left")
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (10_000_000_000, 12_500_000_000)


def test_a_collector_that_does_not_answer_delays_nothing_and_is_reported_once(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    rules = SendingRules(queue_spans=64, batch_spans=16, batch_seconds=0.05, send_seconds=0.2)
    tracer = EpisodeTracer(receiver.url, rules)
    with caplog.at_level(logging.INFO, "rookery.telemetry.tracing"):
        for number in range(2000):
            tracer.episode(str(number), 1.0, 2.0, {}, [TracedCall("request", 1.0, 2.0)], "")
        until(lambda: "does not take traces" in caplog.text)
        receiver.status = 200
        tracer.episode("later", 1.0, 2.0, {}, [], "")

        def again() -> bool:
            tracer.episode("more", 1.0, 2.0, {}, [], "")
            return "takes traces again" in caplog.text

        until(again)
    assert caplog.text.count("does not take traces") == 1
    receiver.status = 400
    began = time.monotonic()
    tracer.close(1.0)
    assert time.monotonic() - began < 30.0


def test_service_with_a_dead_collector_trains_and_ends(tmp_path: Path) -> None:
    with (
        served(tmp_path, otlp_url="http://127.0.0.1:9") as service,
        ThreadedWorker.of(service),
        Client(service.url, service.key) as client,
    ):
        assert client.submit(job(name="untraced", stop={"steps": 2})).wait().state == "completed"
