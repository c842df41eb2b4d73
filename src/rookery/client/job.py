"""A job on a service: what it does, what it learned, and how to steer it."""

from __future__ import annotations

import io
import logging
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rookery.client.connection import Connection, ConnectionBroken, Record
from rookery.errors import RookeryError, StorageFull

log = logging.getLogger("rookery.client")

RETURN_SECONDS = 120.0
"""How long a followed job's service may be away (a restart) before that is an error."""

RETRY_SECONDS = 1.0
"""Between attempts to take up a broken stream: gentle on a service that is just starting."""


class JobTimeout(RookeryError, TimeoutError):
    """The job had not ended when the time given to ``wait`` was over. It goes on."""


class Job:
    """``id`` and ``name`` never change; everything else is asked for. ``ended`` is called when the job is seen to have
    ended."""

    def __init__(self, connection: Connection, id: str, name: str, ended: Callable[[], None] = lambda: None) -> None:
        self.id = id
        self.name = name
        self._connection = connection
        self._path = f"/api/v1/jobs/{id}"
        self._ended = ended

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.id!r})"

    # --- what it does -------------------------------------------------------------------------------------------------

    def show(self) -> Record:
        """The job as it is now: state, step, reward, what it waits for, …"""
        view: Record = self._connection.call("GET", self._path)
        return view

    def metrics(self, after: int = -1, follow: bool = True) -> Iterator[Record]:
        """One row per optimizer step, as they come, until the job has ended (or only those that are there)."""
        if not follow:
            yield from self._connection.call("GET", f"{self._path}/metrics", params={"after": after})
            return
        for kind, data in self.follow(after):
            if kind == "metrics":
                yield data
            elif kind == "job" and data.state == "paused":
                log.warning("job %s is paused: %s; job.resume() lets it go on", self.name, data.reason)

    def wait(self, timeout: float | None = None) -> Record:
        """Blocks until the job has ended; answers it (``state``: completed, failed or cancelled, ``reason``). Raises
        :class:`WaitedTooLong` when it has not after ``timeout`` seconds, give or take a heartbeat."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for kind, data in self.follow(after=2**31):
            if kind == "end":
                return data
            if deadline is not None and time.monotonic() > deadline:
                raise JobTimeout(f"job {self.name} had not ended after {timeout} s; it goes on")
        return self.show()

    def follow(self, after: int = -1) -> Iterator[tuple[str, Record]]:
        """What the service says of the job: ``("metrics", row)``, ``("job", view)`` first and when its state changes,
        ``("beat", {})`` every few seconds, and last ``("end", view)``. Goes on after a broken connection, and after a
        full disk of the service's; raises what it was when that lasts."""
        last_word = time.monotonic()
        pause = threading.Event()
        while True:
            try:
                for kind, data in self._connection.stream(f"{self._path}/metrics/stream", params={"after": after}):
                    last_word = time.monotonic()
                    if kind == "metrics":
                        after = data["step"]
                    if kind == "end":
                        self._ended()
                    yield kind, data
                    if kind == "end":
                        return
            except (ConnectionBroken, StorageFull) as error:
                if time.monotonic() - last_word > RETURN_SECONDS:
                    raise
                log.debug("following %s: %s", self.name, error)
            pause.wait(RETRY_SECONDS)

    def events(self, limit: int = 100) -> list[Record]:
        """What happened to the job, newest last."""
        return self._rows("events", limit=limit)

    # --- steering it --------------------------------------------------------------------------------------------------

    def pause(self) -> Record:
        return self._act("pause")

    def resume(self) -> Record:
        return self._act("resume")

    def cancel(self) -> Record:
        view = self._act("cancel")
        self._ended()
        return view

    # --- what it learned ----------------------------------------------------------------------------------------------

    def sample(self, messages: list[dict[str, str]] | str, version: int | None = None, **sampling: object) -> Record:
        """One completion of this job's policy, its newest version unless another is named. ``sampling``: max_tokens,
        temperature, seed, stop."""
        return sample(self._connection, self.id if version is None else f"{self.id}@{version}", messages, **sampling)

    def trajectories(self, limit: int = 20, version: int | None = None) -> list[Record]:
        """Recent episodes: text, tokens, log-probabilities, versions, rewards."""
        return self._rows("trajectories", limit=limit, **({} if version is None else {"version": version}))

    def versions(self, policy: str = "main") -> list[Record]:
        """A policy's versions, oldest first."""
        return self._rows(f"policies/{policy}/versions")

    def evaluations(self) -> list[Record]:
        """Held-out figures of the versions that were evaluated."""
        return self._rows("evaluations")

    def adapter(self, version: int | None = None, policy: str = "main") -> AdapterFolder:
        """A version's PEFT folder, the newest by default; ``download`` fetches it."""
        number = "latest" if version is None else str(version)
        return AdapterFolder(self._connection, f"{self._path}/policies/{policy}/versions/{number}/adapter")

    def _act(self, action: str) -> Record:
        view: Record = self._connection.call("POST", f"{self._path}/{action}")
        return view

    def _rows(self, what: str, **params: int) -> list[Record]:
        rows: list[Record] = self._connection.call("GET", f"{self._path}/{what}", params=params)
        return rows


class AdapterFolder:
    """A version's adapter, not yet downloaded."""

    def __init__(self, connection: Connection, path: str) -> None:
        self._connection = connection
        self._path = path

    def download(self, folder: str | Path) -> Path:
        """Writes the PEFT folder's files into ``folder``, which is made; answers it."""
        target = Path(folder).expanduser()
        content = self._connection.download(self._path)
        target.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(target, filter="data")
        return target


def sample(connection: Connection, target: str, messages: list[dict[str, str]] | str, **sampling: object) -> Record:
    """One completion. A text alone is one message of the user."""
    asked = {"target": target, "messages": _messages(messages), **sampling}
    completion: Record = connection.call("POST", "/api/v1/sample", json=asked)
    return completion


def stream(
    connection: Connection, target: str, messages: list[dict[str, str]] | str, **sampling: object
) -> Iterator[str]:
    """The text of one completion, piece by piece as it is sampled."""
    asked: dict[str, Any] = {"model": target, "messages": _messages(messages), "stream": True, **sampling}
    for _, data in connection.stream("/v1/chat/completions", "POST", json=asked):
        if "error" in data:
            raise RookeryError(str(data.error.message))
        yield "".join(choice.delta.get("content") or "" for choice in data.get("choices", []))


def _messages(messages: list[dict[str, str]] | str) -> list[dict[str, str]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
