"""Traces of episodes for an OpenTelemetry collector, over OTLP/HTTP: one trace an episode, with a span for each request
and each call of its environment.

Nothing waits for a collector: spans wait in a bounded queue for a thread that sends them, and are dropped where it is
full or the collector does not answer.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rookery.errors import UserError

if TYPE_CHECKING:  # the packages of the extra otel are imported where a trace is wanted
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult

log = logging.getLogger("rookery.telemetry.tracing")

PATH = "/v1/traces"
"""Of a collector, which a setting without a path gets."""


@dataclass(frozen=True)
class SendingRules:
    """Bounds of what waits for a collector."""

    queue_spans: int = 8192
    """Spans that wait to be sent: some thousand episodes, and some megabytes."""
    batch_spans: int = 512
    """Spans of one message."""
    batch_seconds: float = 2.0
    """Longest wait before a message is sent."""
    send_seconds: float = 5.0
    """Time for a message with its repetitions; then its spans are dropped."""


SENDING_RULES = SendingRules()


class TracedCall(NamedTuple):
    """A request or a call of the environment, as a span of its episode. Times are Unix seconds."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Any] = {}
    parts: Sequence[TracedCall] = ()


class EpisodeTracer:
    """Sends episodes to a collector. Raises :class:`UserError` where the packages of the extra ``otel`` are absent."""

    def __init__(self, url: str, rules: SendingRules = SENDING_RULES) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError:
            raise UserError(
                "ROOKERY_OTLP_URL needs the packages of the extra otel: pip install 'rookery[otel]', or unset it"
            ) from None

        class EpisodeIds(RandomIdGenerator):
            """The trace of an episode is found by its id."""

            episode = ""

            def generate_trace_id(self) -> int:
                return trace_id(self.episode)

        class Watched(SpanExporter):
            """Says once that the collector does not answer, and once that it does again."""

            failed = False

            def __init__(self, inner: SpanExporter) -> None:
                self._inner = inner

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                try:
                    result = self._inner.export(spans)
                except Exception as error:  # whatever an unknown server causes
                    result = SpanExportResult.FAILURE
                    log.debug("the OTLP collector: %r", error)
                failed = result is not SpanExportResult.SUCCESS
                if failed and not self.failed:
                    log.warning("the OTLP collector at %s does not take traces; they are dropped meanwhile", url)
                elif self.failed and not failed:
                    log.info("the OTLP collector at %s takes traces again", url)
                self.failed = failed
                return result

            def shutdown(self) -> None:
                self._inner.shutdown()

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would report each message that is not taken
        whole = url if "/" in url.partition("://")[2].rstrip("/") else url.rstrip("/") + PATH
        self._exporter = Watched(OTLPSpanExporter(endpoint=whole, timeout=rules.send_seconds))
        processor = BatchSpanProcessor(
            self._exporter, max_queue_size=rules.queue_spans, max_export_batch_size=rules.batch_spans,
            schedule_delay_millis=1000 * rules.batch_seconds,
        )  # fmt: skip
        self._ids = EpisodeIds()
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "rookery"}), id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("rookery")

    def episode(
        self, id: str, start: float, end: float, attributes: Mapping[str, Any], calls: Sequence[TracedCall], error: str
    ) -> None:
        """Queue the trace of an episode; returns at once. ``error`` is empty for one that did not fail."""
        from opentelemetry.trace import Status, StatusCode

        self._ids.episode = id
        root = self._tracer.start_span("episode", start_time=_nanoseconds(start), attributes=dict(attributes))
        self._add(root, calls)
        if error:
            root.set_status(Status(StatusCode.ERROR, error))
        root.end(_nanoseconds(end))

    def _add(self, parent: Any, calls: Sequence[TracedCall]) -> None:
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent)
        for call in calls:
            start = _nanoseconds(call.start)
            span = self._tracer.start_span(call.name, context, start_time=start, attributes=dict(call.attributes))
            self._add(span, call.parts)
            span.end(_nanoseconds(call.end))

    def close(self, seconds: float) -> None:
        """Send what waits, for at most so many seconds."""
        sending = threading.Thread(target=self._provider.force_flush, daemon=True)  # a dead collector does not hold it
        sending.start()
        sending.join(seconds)
        with suppress(Exception):
            self._exporter.shutdown()  # ends what is still sent, and with it the thread of the queue


def trace_id(episode: str) -> int:
    """The id of an episode's trace, as OpenTelemetry has it (128 bits, not 0)."""
    return int.from_bytes(hashlib.blake2b(episode.encode(), digest_size=16).digest()) or 1


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
