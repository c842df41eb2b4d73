"""A broken environment logs one traceback per place, then counts."""

from __future__ import annotations

import logging

import pytest

from rookery.environments.failures import LINES, FailureLog

log = logging.getLogger("tests.failures")


def fail(failures: FailureLog, job: str, kind: type[Exception] = ValueError) -> None:
    try:
        raise kind("no such row")
    except Exception as error:
        failures.report("episode e", job, error)


def test_a_place_that_fails_again_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(log)
    with caplog.at_level(logging.WARNING):
        for _ in range(1845):
            fail(failures, "job-1")
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False, False]
    counts = [record.getMessage() for record in caplog.records[1:]]
    for count, line in zip((10, 100, 1000), counts, strict=True):
        assert f"{count} failures at {__file__}:" in line and "ValueError: no such row" in line and "\n" not in line


def test_another_job_and_another_error_have_their_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(log)
    for job, kind in (("a", ValueError), ("b", ValueError), ("a", KeyError), ("a", ValueError)):
        fail(failures, job, kind)
    assert [bool(record.exc_info) for record in caplog.records] == [True, True, True]
    for number in range(LINES):
        fail(failures, str(number))
    caplog.clear()
    fail(failures, "a")
    assert len(caplog.records) == 1, "the memory is bounded"
