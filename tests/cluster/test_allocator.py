"""Workers run with the allocator that is asked for, where the machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes.util import find_library

import pytest

from rookery.cluster.allocator import PRELOAD, preloaded
from rookery.cluster.local import LocalHost, LocalWorkers
from rookery.settings import Settings

HERE = find_library(Settings().worker.allocator)


@pytest.mark.skipif(HERE is None, reason=f"this machine has no {Settings().worker.allocator}")
def test_a_process_runs_with_the_allocator_of_the_settings() -> None:
    maps = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    environment = preloaded({"PATH": "/usr/bin"}, Settings().worker.allocator)
    found = subprocess.run(maps, env=environment, capture_output=True, text=True, check=True)
    assert str(HERE) in found.stdout and not found.stderr
    assert str(HERE) not in subprocess.run(maps, env={}, capture_output=True, text=True, check=True).stdout


def test_what_is_preloaded_already_stays() -> None:
    assert preloaded({PRELOAD: "libother.so"}, "c") == {PRELOAD: f"{find_library('c')} libother.so"}
    chosen = {PRELOAD: "/opt/libjemalloc.so.2", "A": "b"}
    assert preloaded(chosen, "c") == chosen


def test_without_the_library_or_with_no_name_it_is_the_c_librarys() -> None:
    assert preloaded({"A": "b"}, "no_such_allocator") == {"A": "b"}
    assert preloaded({"A": "b"}, "") == {"A": "b"}


def test_the_workers_of_a_service_get_it_and_its_environments_do_not() -> None:
    settings = Settings.load()
    (worker,) = LocalWorkers(settings, "http://127.0.0.1:1", "token").children
    (host,) = LocalHost(settings, "http://127.0.0.1:1", "token").children
    assert worker.environment.get(PRELOAD) == preloaded(host.environment, settings.worker.allocator).get(PRELOAD)
    assert host.environment.get(PRELOAD) == os.environ.get(PRELOAD)
