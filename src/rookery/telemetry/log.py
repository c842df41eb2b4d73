"""The structured log: one JSON object per line, with the tenant, job and version that the line concerns.

Packages log through ``logging.getLogger("rookery.<package>")`` and pass context fields in ``extra``. Nothing is
configured on import; a process calls :func:`logging_to` once, which restores logging when it ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

FIELDS = ("tenant", "job", "policy", "version", "worker", "episode", "request")
"""Context fields that ``extra`` may have; each becomes a field of the line."""

LOGGERS = {"rookery": logging.DEBUG, "uvicorn.error": logging.WARNING}
"""The loggers that are shown, each with its lowest level: this package, and warnings of the HTTP server."""

FILE_BYTES = 16 << 20
"""Size at which a log file is rotated: about a day of a busy service at INFO."""

FILES = 4
"""Number of log files kept, so that a log never fills the data folder."""


MESSAGE, FIELD, TRACEBACK = 2000, 200, 20_000
"""Characters of a message, of a context field and of a traceback that are kept. A message may quote a stranger."""


def printable(text: str, most: int) -> str:
    """``text`` for a log or a terminal: one line of at most ``most`` characters. Characters that break a line, move the
    cursor, or reverse the direction of text are escaped: no stranger's text looks like a line of its own."""
    if len(text) > most:
        text = f"{text[:most]}... ({len(text) - most} more characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _context(record: logging.LogRecord) -> dict[str, object]:
    """The context fields that a record has."""
    fields = {name: value for name in FIELDS if (value := vars(record).get(name)) not in (None, "")}
    texts = {name: printable(value, FIELD) for name, value in fields.items() if isinstance(value, str)}
    return {**fields, **texts}


def _traceback(record: logging.LogRecord) -> str:
    lines = logging.Formatter().formatException(record.exc_info)[-TRACEBACK:].splitlines()  # type: ignore[arg-type]
    return "\n".join(printable(line, MESSAGE) for line in lines)


class JsonLines(logging.Formatter):
    """``{"time": …, "level": …, "room": …, "message": …, "tenant"?…, "traceback"?…}``; times are UTC, ISO 8601."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "room": record.name.removeprefix("rookery."),
            "message": printable(record.getMessage(), MESSAGE),
        }
        line.update(_context(record))
        if record.exc_info:
            line["traceback"] = _traceback(record)
        return json.dumps(line, ensure_ascii=False, default=str)


class TerminalLines(logging.Formatter):
    """Lines for a terminal: time of day, message and context fields; tracebacks are only in the file."""

    def format(self, record: logging.LogRecord) -> str:
        context = " ".join(f"{name}={value}" for name, value in _context(record).items())
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        return f"{time} {level}{printable(record.getMessage(), MESSAGE)}" + (f"  [{context}]" if context else "")


class ProcessLines(logging.Formatter):
    """Lines of a worker's or a host's standard error: time, level, logger and message, then the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        line = f"{time} {record.levelname} {record.name}: {printable(record.getMessage(), MESSAGE)}"
        return f"{line}\n{_traceback(record)}" if record.exc_info else line


class _File(RotatingFileHandler):
    """A line that cannot be written because the disk is full is dropped; other code reports the full disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the standard library's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a line in the buffer is dropped too
            super().close()


def file_handler(path: Path) -> logging.Handler:
    """JSON lines in ``path``, rotated. The folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _File(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8", delay=True)
    handler.setFormatter(JsonLines())
    return handler


def terminal_handler() -> logging.Handler:
    """Lines for a person on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(TerminalLines())
    return handler


def log_to_stderr(level: str) -> None:
    """Configures the log of a worker or a host: this package's lines at ``level`` and others' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(ProcessLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("rookery").setLevel(level)  # others log requests with their keys


@contextmanager
def logging_to(handlers: list[logging.Handler], level: str) -> Iterator[None]:
    """Within, the lines of :data:`LOGGERS` at ``level`` and above go to ``handlers``. At the end the handlers are
    closed and the previous configuration is restored."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logging.getLevelNamesMapping()[level.upper()], LOGGERS[logger.name]))
        logger.propagate = False
        for handler in handlers:
            logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, old_level, propagate in before:
            logger.setLevel(old_level)
            logger.propagate = propagate
            for handler in handlers:
                logger.removeHandler(handler)
        for handler in handlers:
            handler.close()
