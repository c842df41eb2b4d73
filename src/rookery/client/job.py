"""A job on a service: its progress, its results, and its control."""

from __future__ import annotations

import json
import logging
import math
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from rookery.client.connection import WORK_SECONDS, HttpConnection, Record, segment
from rookery.client.hub import model_card, push_folder
from rookery.client.tensorboard import FILE_VERSION, event
from rookery.errors import RookeryError, StorageFull, TooManyRequests, Unavailable, UserError, short
from rookery.folders import named_path, replaced, temporary_file, temporary_folder
from rookery.telemetry.numbers import numbers

log = logging.getLogger("rookery.client")

RECONNECT_SECONDS = 120.0
"""Longest absence of the service, such as a restart, that following a job tolerates."""

TEMPORARY = (Unavailable, TooManyRequests, StorageFull)
"""Errors of a service that may answer later."""

RETRY_SECONDS = 1.0
"""Pause between attempts to resume a broken stream."""


ENDED = ("completed", "failed", "cancelled")
"""States of a job that has ended."""


def _nothing() -> None:
    """A job whose end concerns nobody here."""


class JobTimeout(RookeryError, TimeoutError):
    """The job did not end within the timeout of ``wait``. It continues."""


EPISODES_AT_ONCE = 50
"""Of one request: their texts may be long."""


class Job:
    """``id`` and ``name`` never change; everything else is requested from the service. ``on_end`` is called when the
    client learns that the job has ended."""

    def __init__(
        self, connection: HttpConnection, id: str, name: str, on_end: Callable[[], None] | None = None
    ) -> None:
        self.id = id
        self.name = name
        self._connection = connection
        self._path = f"/api/v1/jobs/{id}"
        self._on_end = on_end or _nothing

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_on_end": _nothing}  # what hosts its environment stays in its process

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.id!r})"

    # --- progress -------------------------------------------------------------------------------------------------

    def show(self) -> Record:
        """The current state of the job: state, step, reward, the resource that it waits for and more."""
        return self._connection.call("GET", self._path)

    def metrics(self, after: int = -1, follow: bool = True) -> Iterator[Record]:
        """One row per optimizer step, as they arrive, until the job has ended; without ``follow`` only the present
        rows. A job that was rolled back takes steps again: their rows replace those of the same and later steps."""
        if not follow:
            yield from self._connection.rows(f"{self._path}/metrics", after=after)
            return
        yield from (data for kind, data in self._progress(after) if kind == "metrics")

    def _progress(self, after: int = -1) -> Iterator[tuple[str, Record]]:
        """The events of :meth:`follow`; a pause is logged."""
        for kind, data in self.follow(after):
            yield kind, data
            if kind == "job" and data.state == "paused":
                log.warning("job %s is paused: %s; job.resume() resumes it", self.name, data.reason)

    def write_tensorboard(self, folder: str | Path, follow: bool = False) -> Path:
        """Write the job's metrics and evaluations into ``folder``, into a file of the job that replaces an earlier one;
        with ``follow``, the metrics as they arrive until the job has ended. Returns the file, whose folder
        ``tensorboard --logdir`` reads."""
        created = self.show().created
        target = named_path(folder)
        target.mkdir(parents=True, exist_ok=True)
        file = target / f"events.out.tfevents.{int(created)}.{self.id}"
        steps: dict[tuple[str, int], tuple[int, float]] = {}
        """By policy and version: the last step in it, and when it was taken."""
        with file.open("wb") as out:
            out.write(event(created, version=FILE_VERSION))
            present = (("metrics", row) for row in self.metrics(follow=False)) if not follow else self._progress()
            for kind, row in present:
                if kind == "rollback":
                    out.write(event(created, row["step"] + 1, restart=True))
                    steps = {key: taken for key, taken in steps.items() if taken[0] <= row["step"]}
                if kind != "metrics":
                    continue
                values, policy = dict(numbers(row)), row.get("policy") or ""
                step, time = int(values.pop("step")), values.pop("time", created)
                steps[policy, int(values.pop("version", step))] = step, time
                prefix = f"{policy}/" if policy else ""
                out.write(event(time, step, {prefix + name: value for name, value in values.items()}))
                if follow:
                    out.flush()
            found = self.evaluations()
            several = any(policy for policy, _ in steps) or len({one.policy for one in found}) > 1
            for one in found:
                unknown = (one.version, created)  # the untrained version
                step, time = steps.get((one.policy, one.version), steps.get(("", one.version), unknown))
                prefix = f"{one.policy}/" if several else ""
                values = {f"{prefix}evaluation/{name}": value for name, value in numbers(one) if name != "version"}
                out.write(event(time, step, values))
        return file

    def wait(self, timeout: float | None = None) -> Record:
        """Blocks until the job has ended; returns it (``state``: completed, failed or cancelled, ``reason``). Raises
        :class:`JobTimeout` if it has not ended after ``timeout`` seconds, within a heartbeat; 0 asks once."""
        if timeout is not None and (not isinstance(timeout, int | float) or math.isnan(timeout)):
            raise UserError(f"timeout: given {timeout!r}, allowed: a number of seconds, or None to wait without end")
        clock = self._connection.clock
        deadline = None if timeout is None else clock.monotonic() + timeout
        late = f"job {self.name} had not ended after {timeout} s"
        try:
            for kind, data in self._follow(2**31, deadline):
                if kind == "end":
                    return data
                if kind == "job" and data.state in ENDED:
                    continue  # the end is the next event
                if deadline is not None and clock.monotonic() > deadline:
                    raise JobTimeout(f"{late}; it continues")
        except TEMPORARY as error:
            if deadline is None or clock.monotonic() < deadline:
                raise
            raise JobTimeout(f"{late}: {error}") from None
        return self.show()

    def follow(self, after: int = -1) -> Iterator[tuple[str, Record]]:
        """The job's events: ``("metrics", row)``, ``("job", view)`` first and when its state changes, ``("heartbeat",
        {})`` every few seconds, ``("rollback", {"step": n})`` when the job went back, so that the rows of steps later
        than ``n`` are deleted and taken again, and last ``("end", view)``. Resumes after a broken connection, and while
        the service is not available, refuses further requests for a while or has a full disk; raises the error if that
        lasts."""
        yield from self._follow(after, None)

    def _follow(self, after: int, until: float | None) -> Iterator[tuple[str, Record]]:
        """Its events; from ``until`` of the monotonic clock on, an error is raised at once."""
        clock = self._connection.clock
        absent_since: float | None = None
        headers: dict[str, str] = {}
        while True:
            try:
                for kind, data in self._connection.stream(
                    f"{self._path}/metrics/stream", params={"after": after}, headers=headers
                ):
                    absent_since = None
                    if kind in ("metrics", "rollback"):
                        after, taken = data["step"], data.get("renewed", data.get("time"))
                        headers = {} if taken is None else {"Last-Event-ID": f"{after}@{taken!r}"}
                    if kind == "end":
                        self._on_end()
                    yield kind, data
                    if kind == "end":
                        return
                raise Unavailable(f"the service stopped to send the events of job {self.name}")
            except TEMPORARY as error:
                now = clock.monotonic()  # not that of the last event: the caller may have worked on it for long
                absent_since = now if absent_since is None else absent_since
                if now - absent_since > RECONNECT_SECONDS or (until is not None and now >= until):
                    raise
                log.debug("following %s: %s", self.name, error)
                pause = min(max(RETRY_SECONDS, getattr(error, "retry_after", 0.0)), RECONNECT_SECONDS / 4)
                clock.sleep(pause if until is None else min(pause, until - now))

    def events(self, limit: int = 100) -> list[Record]:
        """The job's event log, newest last."""
        return self._rows("events", limit=limit)

    # --- control --------------------------------------------------------------------------------------------------

    def pause(self) -> Record:
        """Stop the job's work until it is resumed; nothing is lost. Returns the job."""
        return self._act("pause")

    def resume(self) -> Record:
        """Continue a paused job from its last step. Returns the job."""
        return self._act("resume")

    def rollback(self) -> Record:
        """Resume a paused job from the newest version that is there, because the bytes of its last one are lost."""
        return self._act("rollback")

    def cancel(self) -> Record:
        """End the job for good; its versions stay. Returns the job."""
        view = self._act("cancel")
        self._on_end()
        return view

    def delete(self) -> None:
        """Delete the job with its versions and results. Raises :class:`~rookery.errors.Conflict` for one that has not
        ended."""
        self._connection.call("DELETE", self._path)

    # --- results ----------------------------------------------------------------------------------------------

    def sample(self, messages: list[dict[str, str]] | str, version: int | None = None, **sampling: object) -> Record:
        """One completion of this job's policy, by default of its newest version. ``sampling``: max_tokens,
        temperature, seed, stop."""
        return sample(self._connection, self.id if version is None else f"{self.id}@{version}", messages, **sampling)

    def trajectories(self, limit: int = 20, version: int | None = None) -> list[Record]:
        """Recent episodes: text, tokens, log-probabilities, versions, rewards."""
        return self._rows("trajectories", limit=limit, **({} if version is None else {"version": version}))

    def episodes(
        self,
        *,
        step: int | None = None,
        failed: bool | None = None,
        text: str = "",
        group: str | None = None,
        version: int | None = None,
        limit: int = 25,
    ) -> list[Record]:
        """Episodes that have ended, newest first: prompt, replies, reward, error. ``step``: of the groups
        consumed by the version that holds it; ``failed``: only failed ones, or only others; ``text``: part of a text or
        of an error."""
        wanted = {"step": step, "failed": failed, "text": text or None, "group": group, "version": version}
        params: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        rows: list[Record] = []
        while len(rows) < limit:
            params["limit"] = min(EPISODES_AT_ONCE, limit - len(rows))
            page = self._connection.call("GET", f"{self._path}/episodes", params=params)
            rows += page.episodes
            if page.next is None:
                break
            params["before"] = page.next
        return rows

    def episode(self, id: str) -> Record:
        """One episode whole: messages, what each turn earned, tokens with log-probabilities and versions."""
        return self._connection.call("GET", f"{self._path}/episodes/{segment('episode', id)}")

    def groups(self, step: int | None = None, *, limit: int = 50) -> list[Record]:
        """The newest training groups, or those consumed by the version that holds ``step`` (with ``commit_every``, one
        version may hold several steps): rewards and advantages of their episodes."""
        params = {"limit": limit, **({} if step is None else {"step": step})}
        return list(self._connection.call("GET", f"{self._path}/groups", params=params).groups)

    def timeline(self, start: float | None = None, end: float | None = None) -> Record:
        """The work of workers, environments and the trainer for the job between two Unix times, by default the last ten
        minutes; all other work is ``busy``."""
        return self._connection.call("GET", f"{self._path}/timeline", params=times(start, end))

    def trace(
        self, file: str | Path, start: float | None = None, end: float | None = None, seconds: float | None = None
    ) -> Path:
        """Writes the timeline of the job as a trace, which https://ui.perfetto.dev opens; returns ``file``. Without
        ``start``, of the last ``seconds`` before ``end`` or the service's present, or of all the time that is kept."""
        return write_trace(self._connection, f"{self._path}/trace", file, times(start, end, seconds))

    def health(self) -> Record:
        """``alarms`` about the job (name, problem, remedy), and ``advice`` where nothing is wrong."""
        return self._connection.call("GET", f"{self._path}/health")

    def versions(self, policy: str | None = None) -> list[Record]:
        """The versions of a policy, by default of the job's first that trains, oldest first."""
        return list(self._connection.rows(f"{self._policy_path(self._named(policy))}/versions"))

    def evaluations(self) -> list[Record]:
        """Evaluations on held-out prompts, by version."""
        return list(self._connection.rows(f"{self._path}/evaluations"))

    def adapter(self, version: int | None = None, policy: str | None = None) -> AdapterFolder:
        """The PEFT folder of a version, the newest by default, of a policy, by default of the job's first that trains;
        ``download`` fetches it."""
        number, policy = "latest" if version is None else str(version), self._named(policy)
        path = f"{self._policy_path(policy)}/versions/{number}/adapter"
        return AdapterFolder(self._connection, path, self, policy)

    def _policy_path(self, policy: str) -> str:
        return f"{self._path}/policies/{segment('policy', policy)}"

    def _named(self, policy: str | None) -> str:
        """The policy of this name, by default the job's first that trains."""
        return first_trained(self.show().spec.policies) if policy is None else policy

    def _act(self, action: str) -> Record:
        return self._connection.call("POST", f"{self._path}/{action}")

    def _rows(self, path: str, **params: int) -> list[Record]:
        return self._connection.call("GET", f"{self._path}/{path}", params=params)


def first_trained(policies: Mapping[str, Any]) -> str:
    """The name of the first policy that trains, of the policies of a job's spec."""
    return next(name for name, settings in policies.items() if settings.get("train", True))


def check_lora(policies: Mapping[str, Any], policy: str, instead: str) -> None:
    """Raises :class:`UserError`, with what to do ``instead``, where the versions of ``policy``, one of a job's
    ``policies``, are whole models."""
    if (policies.get(policy) or {}).get("full"):
        raise UserError(
            f"policy {short(policy)} trains all parameters: its version is a whole model, no adapter; rookery adapters"
            f" download writes it as a folder of transformers ({instead})"
        )


class AdapterFolder:
    """A version's adapter."""

    def __init__(self, connection: HttpConnection, path: str, job: Job, policy: str) -> None:
        self._connection = connection
        self._path = path
        self._job = job
        self._policy = policy
        self.version: int | None = None
        """The number of the version that was downloaded last."""
        self.files: list[str] = []
        """The names of its files."""

    def push(self, repo: str, *, license: str | None = None, private: bool = True, token: str | None = None) -> str:
        """Uploads the PEFT folder with a model card to the Hugging Face Hub as the model ``repo``, such as
        ``org/name``, and returns its address. ``token`` is by default that of ``hf auth login`` or ``HF_TOKEN``;
        ``HF_ENDPOINT`` names another Hub. This process uploads: the service gets no token."""
        policy = self._policy
        check_lora(self._job.show().spec.policies, policy, "hf upload pushes its files")
        with temporary_folder("rookery-push-") as folder:
            files = self.download(folder)
            version = next(one for one in self._job.versions(policy) if one.version == self.version)
            config = json.loads((files / "adapter_config.json").read_text(encoding="utf-8"))
            view, rows = self._job.show(), list(self._job.metrics(follow=False))
            evaluations = [one for one in self._job.evaluations() if one.get("policy") in (None, "", policy)]

            def card(name: str) -> str:
                return model_card(name, view, policy, version, rows, evaluations, config, license)

            message = f"{view.name}, version {version.version}"
            return push_folder(files, repo, card, token=token, private=private, message=message)

    def download(self, folder: str | Path) -> Path:
        """Writes the files of the PEFT folder into ``folder``, which is created if necessary; returns it. A file there
        is replaced when the new one is whole."""
        target, self.files = named_path(folder), []
        with temporary_file() as tar:
            self.version = int(self._connection.download(self._path, tar, "application/x-tar")["X-Version"])
            tar.seek(0)
            target.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=tar) as archive:
                for member in archive:
                    content = archive.extractfile(member)
                    if content is None or Path(member.name).name != member.name:
                        raise UserError(f"the adapter's archive has {short(member.name)}, which is no file of it")
                    with replaced(target / member.name) as file:
                        shutil.copyfileobj(content, file)
                    self.files.append(member.name)
        return target


def times(start: float | None, end: float | None, seconds: float | None = None) -> dict[str, float]:
    """The given times as the parameters of a request."""
    given = (("start", start), ("end", end), ("seconds", seconds))
    return {name: value for name, value in given if value is not None}


def write_trace(connection: HttpConnection, path: str, file: str | Path, given: dict[str, float]) -> Path:
    """Write the trace at ``path`` of the service to ``file``, of the ``given`` :func:`times`."""
    target, query = named_path(file), httpx.QueryParams(given)
    with temporary_file() as content:
        connection.download(f"{path}?{query}", content)
        content.seek(0)
        with replaced(target) as out:
            shutil.copyfileobj(content, out)
    return target


def sample(connection: HttpConnection, target: str, messages: list[dict[str, str]] | str, **sampling: object) -> Record:
    """One completion. A text is one user message."""
    request = {"target": target, "messages": _messages(messages), **sampling}
    return connection.call("POST", "/api/v1/sample", json=request, seconds=WORK_SECONDS)


def stream(
    connection: HttpConnection, target: str, messages: list[dict[str, str]] | str, **sampling: object
) -> Iterator[str]:
    """The text of one completion in chunks as it is sampled."""
    request: dict[str, Any] = {"model": target, "messages": _messages(messages), "stream": True, **sampling}
    for _, data in connection.stream("/v1/chat/completions", "POST", json=request):
        if "error" in data:
            raise RookeryError(str(data.error.message))
        yield "".join(choice.delta.get("content") or "" for choice in data.get("choices", []))


def _messages(messages: list[dict[str, str]] | str) -> list[dict[str, str]]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
