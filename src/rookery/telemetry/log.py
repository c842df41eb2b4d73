"""The structured log: one JSON object per line, with the tenant, job and version that a line is about.

Rooms log through ``logging.getLogger("rookery.<room>")`` and name what they know in ``extra``. Nothing is configured on
import; a process says once, with :func:`logging_to`, where its lines go, and takes that back when it ends.
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
"""What ``extra`` may name; each becomes a field of the line where it is given."""

LOGGERS = {"rookery": logging.DEBUG, "uvicorn.error": logging.WARNING}
"""The package's own lines, and the HTTP server's where something is wrong; each with the lowest level ever shown."""

FILE_BYTES = 16 << 20
"""A log file is rotated at this size: about a day of a busy service at INFO."""

FILES = 4
"""Rotated files kept, so that a log never fills the data folder."""


class JsonLines(logging.Formatter):
    """``{"time": …, "level": …, "room": …, "message": …, "tenant"?…, "traceback"?…}``; times are UTC, ISO 8601."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "room": record.name.removeprefix("rookery."),
            "message": record.getMessage(),
        }
        line.update({name: vars(record)[name] for name in FIELDS if vars(record).get(name) not in (None, "")})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ForPeople(logging.Formatter):
    """The same lines for a terminal: time of day, message, and what it is about; tracebacks stay in the file."""

    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(f"{name}={vars(record)[name]}" for name in FIELDS if vars(record).get(name) not in (None, ""))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        return f"{time} {level}{record.getMessage()}" + (f"  [{about}]" if about else "")


class _File(RotatingFileHandler):
    """A line that the disk does not take is lost, and nothing else: a full disk is said by those who need it."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the standard library's name
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what was not written yet is such a line too
            super().close()


def file_handler(path: Path) -> logging.Handler:
    """Lines into ``path``, rotated. The folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _File(path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8", delay=True)
    handler.setFormatter(JsonLines())
    return handler


def terminal_handler() -> logging.Handler:
    """Lines for people, on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(ForPeople())
    return handler


@contextmanager
def logging_to(handlers: list[logging.Handler], level: str) -> Iterator[None]:
    """Send the lines of :data:`LOGGERS` at ``level`` and above to ``handlers`` for as long as this is open; then close
    them and leave logging as it was found."""
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
