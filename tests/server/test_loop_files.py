"""The event loop of a service opens, renames and deletes no file: a slow disk would hold up every caller."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.support.faces import MODEL, ThreadedWorker, job, served
from tests.support.waiting import until

THREAD = "service"
"""The name of the thread in which an embedded service runs its loop."""

FILES = ("open", "shutil.", "sqlite3.connect", "subprocess.Popen", "os.")
"""Beginnings of the events of Python's audit that concern files and processes."""

FREE = ("os.putenv", "os.unsetenv", "os.add_dll_directory")
"""Of these, events that touch neither."""

MEMORY_ONLY = ("/proc/", "/dev/null", "/dev/urandom")
"""Files that no disk holds."""

CODE = (".py", ".pyc", ".so")
"""A module that is imported when it is first needed."""


class Watched:
    """The work of the loop, by event and line of code, once each."""

    on = False

    def __init__(self) -> None:
        self.on = True
        self.found: Counter[str] = Counter()
        self.elsewhere = 0
        """Events of other threads: a proof that the audit sees files."""

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or not event.startswith(FILES) or event in FREE:
            return
        path = str(arguments[0]) if arguments else ""
        if path.startswith(MEMORY_ONLY) or path.endswith(CODE) or "__pycache__" in path:
            return
        if threading.current_thread().name != THREAD:
            self.elsewhere += 1
            return
        frames = [frame for frame in traceback.extract_stack() if "/src/rookery/" in frame.filename]
        places = " < ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in frames[:-4:-1])
        self.found[f"{event} {path} in {places}"] += 1


@contextmanager
def watched() -> Iterator[Watched]:
    """Within, the audit is on. A hook cannot be removed: it stays, and does nothing."""
    watched = Watched()
    sys.addaudithook(watched.hook)
    try:
        yield watched
    finally:
        watched.on = False


@contextmanager
def ready(http: httpx.Client) -> Iterator[None]:
    """The processes of the service have started."""
    http.post("/api/v1/jobs/dry-run", json=job()).raise_for_status()
    yield


def test_the_event_loop_touches_no_file_while_jobs_run_and_callers_read(tmp_path: Path) -> None:
    with (
        served(tmp_path) as service,
        ThreadedWorker.of(service),
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as http,
        ready(http),
        watched() as seen,
    ):
        made = http.post("/api/v1/datasets", content=b'{"prompt": "2+2?", "answer": "4"}\n' * 50)
        assert made.status_code == 201, made.text
        id = http.post("/api/v1/jobs", json=job()).raise_for_status().json()["id"]
        until(lambda: http.get(f"/api/v1/jobs/{id}").json()["state"] == "completed", "the job completes")
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4}
        http.post("/v1/chat/completions", json=asked).raise_for_status()
        answered = Counter(
            http.get(re.sub(r"{\w+}", id, path)).status_code
            for path, methods in http.get("/openapi.json").json()["paths"].items()
            if "get" in methods
        )
        assert answered[200] > 15, answered
        http.get("/").raise_for_status()
    assert seen.elsewhere > 20
    assert not seen.found, "\n".join(f"{count} x {what}" for what, count in seen.found.items())
