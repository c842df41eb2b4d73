"""The structured log: one JSON object per line, with the tenant, job and version that the line concerns.

Packages log through ``logging.getLogger("rookery.<package>")`` and pass context fields in ``extra``. Nothing is
configured on import; a process calls :func:`logging_to` once, which restores logging when it ends. Lines are written in
a thread: neither a slow disk nor a terminal that nobody reads holds up the event loop, or the end of the process.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, TextIO

from rookery.errors import count_of, single_line

FIELDS = ("tenant", "job", "policy", "version", "worker", "episode", "request")
"""Context fields that ``extra`` may have; each becomes a field of the line."""

LOGGERS = {"rookery": logging.DEBUG, "uvicorn.error": logging.WARNING}
"""The loggers that are shown, each with its lowest level: this package, and warnings of the HTTP server."""

FILE_BYTES = 16 << 20
"""Size at which a log file is rotated: about a day of a busy service at INFO."""

FILES = 4
"""Number of log files kept, so that a log never fills the data folder."""


WAITING_LINES = 10_000
"""Lines that may wait to be written; further ones are dropped: a disk that hangs must not take all memory."""

STOP_SECONDS = 5.0
"""Time that the lines which wait have to be written at the end. Those that a disk or a terminal which hangs does not
take by then are dropped."""

_dropped = 0


def dropped_lines() -> int:
    """The number of lines that were dropped since the process began because too many waited."""
    return _dropped


MESSAGE, FIELD, TRACEBACK = 2000, 200, 20_000
"""Characters of a message, of a context field and of a traceback that are kept. A message may quote a stranger."""


def bounded_line(text: str, most: int) -> str:
    """``text`` for a log or a terminal: :func:`~rookery.errors.single_line` of at most ``most`` characters."""
    if len(text) > most:
        text = f"{text[:most]}... ({count_of(len(text) - most, 'more character')})"
    return single_line(text)


def _context(record: logging.LogRecord) -> dict[str, object]:
    """The context fields that a record has."""
    fields = {name: value for name in FIELDS if (value := vars(record).get(name)) not in (None, "")}
    texts = {name: bounded_line(value, FIELD) for name, value in fields.items() if isinstance(value, str)}
    return {**fields, **texts}


def _traceback(record: logging.LogRecord) -> str:
    """The traceback of a record; empty where it has none. That of a line which waits was made before."""
    if not record.exc_info:
        return record.exc_text or ""
    lines = logging.Formatter().formatException(record.exc_info)[-TRACEBACK:].splitlines()
    return "\n".join(bounded_line(line, MESSAGE) for line in lines)


class JsonLines(logging.Formatter):
    """``{"time": …, "level": …, "room": …, "message": …, "tenant"?…, "traceback"?…}``; times are UTC, ISO 8601."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "room": record.name.removeprefix("rookery."),
            "message": bounded_line(record.getMessage(), MESSAGE),
        }
        line.update(_context(record))
        if traceback := _traceback(record):
            line["traceback"] = traceback
        return json.dumps(line, ensure_ascii=False, default=str)


class TerminalLines(logging.Formatter):
    """Lines for a terminal: time of day, message and context fields; tracebacks are only in the file."""

    def format(self, record: logging.LogRecord) -> str:
        context = " ".join(f"{name}={value}" for name, value in _context(record).items())
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        return f"{moment} {level}{bounded_line(record.getMessage(), MESSAGE)}" + (f"  [{context}]" if context else "")


class ProcessLines(logging.Formatter):
    """Lines of a worker's or a host's standard error: time, level, logger and message, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        line = f"{moment} {record.levelname} {record.name}: {bounded_line(record.getMessage(), MESSAGE)}"
        traceback = _traceback(record)
        return f"{line}\n{traceback}" if traceback else line


if TYPE_CHECKING:
    _Stream = logging.StreamHandler[TextIO]
else:
    _Stream = logging.StreamHandler


class _Abandonable(logging.Handler):
    """A handler that the end of the process does not wait for, once it is ``abandoned`` within a write that hangs."""

    abandoned = False

    def acquire(self) -> None:
        if not self.abandoned:
            super().acquire()

    def release(self) -> None:
        if not self.abandoned:
            super().release()

    def flush(self) -> None:
        if not self.abandoned:
            super().flush()

    def close(self) -> None:
        if not self.abandoned:
            super().close()


class _Terminal(_Abandonable, _Stream):
    """Standard error."""


class _File(_Abandonable, RotatingFileHandler):
    """A line that cannot be written because the disk is full is dropped; other code reports the full disk. A file that
    somebody deletes or renames, or whose folder is deleted, is made again for the next line."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a line in the buffer is dropped
            if self.stream is not None and not self._has_name(self.stream.fileno()):
                stream, self.stream = self.stream, None
                stream.close()
        super().emit(record)

    def _has_name(self, descriptor: int) -> bool:
        """Whether the open file is the one of the handler's name."""
        try:
            named = os.stat(self.baseFilename)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(descriptor))

    def _open(self) -> TextIOWrapper:
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        return super()._open()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the standard library's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line in the buffer is dropped too
            super().close()


class _Waiting(QueueHandler):
    """Hands lines to the thread that writes them."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The line's texts are made here, for what it quotes may change, and a traceback holds the objects of its
        frames."""
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        record.exc_text = _traceback(record) if record.exc_info else ""
        record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        global _dropped
        try:
            self.queue.put_nowait(record)
        except Full:
            _dropped += 1  # under the handler's lock


class _Writing(QueueListener):
    """The thread that writes lines."""

    queue: Queue[logging.LogRecord | None]

    def stop_within(self, seconds: float) -> bool:
        """Write the lines that wait, for at most ``seconds``. Returns whether that was possible."""
        deadline = time.monotonic() + seconds
        thread, self._thread = self._thread, None
        with contextlib.suppress(Full):
            self.queue.put(None, timeout=seconds)
        assert thread is not None
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()


def file_handler(path: Path) -> logging.Handler:
    """JSON lines in ``path``, rotated. The folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)  # here too: a start reports a folder that cannot be made
    handler = _File(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8", delay=True)
    handler.setFormatter(JsonLines())
    return handler


def terminal_handler() -> logging.Handler:
    """Lines for a person on standard error."""
    handler = _Terminal()
    handler.setFormatter(TerminalLines())
    return handler


def log_to_stderr(level: str) -> None:
    """Configures the log of a worker or a host: this package's lines at ``level`` and others' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(ProcessLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rookery").setLevel(level)  # others log requests with their keys


@contextmanager
def logging_to(handlers: list[logging.Handler], level: str, waiting_lines: int = WAITING_LINES) -> Iterator[None]:
    """Within, the lines of :data:`LOGGERS` at ``level`` and above go to ``handlers``. At the end, those that wait are
    written within :data:`STOP_SECONDS`, the handlers are closed and the previous configuration is restored."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    waiting = _Waiting(Queue(waiting_lines))
    writing = _Writing(waiting.queue, *handlers, respect_handler_level=True)
    writing.start()
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logging.getLevelNamesMapping()[level.upper()], LOGGERS[logger.name]))
        logger.propagate = False
        logger.addHandler(waiting)
    try:
        yield
    finally:
        for logger, old_level, propagate in before:
            logger.setLevel(old_level)
            logger.propagate = propagate
            logger.removeHandler(waiting)
        if not writing.stop_within(STOP_SECONDS):
            for handler in handlers:
                if isinstance(handler, _Abandonable):
                    handler.abandoned = True
        for handler in handlers:
            handler.close()
