"""One step of a job with the engine and the trainer of a worker: the service, its worker and its environment host run
in this process, and the source files of which it calls something are printed as JSON.

``python -m tests.support.traced_step FOLDER`` takes the second of three steps: from the moment at which a follower
gets the row of the first one to that at which it gets the row of the second.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.faces import job, served
from tests.support.small_model import save_small_model

import rookery
from rookery.client import Client
from rookery.environments.builtins import BUILTINS
from rookery.environments.host import BUILTIN, Host
from rookery.settings import Settings
from rookery.worker.connection import WorkerOptions
from rookery.worker.process import run

SOURCE = f"{Path(rookery.__file__).parent}/"


class Trace:
    """The files of the called functions, also of those that a module has from a decorator."""

    def __init__(self) -> None:
        self.records = False
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.records and event == "call" and frame.f_code.co_name != "<module>":
            self.files.update((frame.f_code.co_filename, str(frame.f_globals.get("__file__"))))

    def sources(self) -> list[str]:
        return sorted(file.removeprefix(SOURCE) for file in self.files if file.startswith(SOURCE))


def follow(url: str, key: str, model: str, trace: Trace) -> None:
    """Run the job to its end, then end the worker."""
    try:
        spec = job(
            base_model=model, stop={"steps": 3}, sampling={"max_tokens": 8}, policies={"main": {"rank": 4}},
            algorithm={"group_size": 4, "groups_per_step": 2},
            environment={"id": "jsonl", "rows": [{"prompt": "Write."}, {"prompt": "Write more."}],
                         "verifier": {"name": "regex", "pattern": "[a-m]"}},
        )  # fmt: skip
        with Client(url, key) as client:
            submitted = client.train(**spec)
            for row in submitted.metrics():
                trace.records = row.step == 1
            assert submitted.wait(timeout=60).state == "completed"
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


async def main(root: Path) -> None:
    trace, model = Trace(), str(save_small_model(root / "small"))
    threading.setprofile(trace)
    sys.setprofile(trace)
    with served(root) as service:
        settings = Settings.load({}, data=service.settings.data, cache=service.settings.cache, threads=1)
        token = (service.settings.data / "worker.token").read_text().strip()
        builtins = {f"{BUILTIN}{id}": builtin for id, builtin in BUILTINS.items()}
        hosting = asyncio.create_task(Host(service.url, token, builtins).run())
        following = asyncio.create_task(asyncio.to_thread(follow, service.url, service.key, model, trace))
        options = WorkerOptions(service.url, token, model, ["rollout", "train"], "reserved", "worker")
        await run(options, settings, None)
        hosting.cancel()
        await following
    print(json.dumps(trace.sources()))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
