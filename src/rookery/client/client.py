"""The client: finds the service and the key, submits jobs with the files that they name, hosts environments."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import tarfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rookery.aio import LoopThread, first_of
from rookery.client.connection import WORK_SECONDS, HttpConnection, Record, RequestRefused, segment
from rookery.client.job import ENDED, Job, sample, stream, times, write_trace
from rookery.environments.base import Environment
from rookery.environments.host import Host
from rookery.errors import (
    NO_ROOM,
    Conflict,
    NotFound,
    RookeryError,
    Unauthorized,
    Unavailable,
    UserError,
    count_of,
    nearest,
    short,
)
from rookery.folders import named_path, temporary_errors, temporary_file
from rookery.settings import CLIENT_SETTINGS, Settings
from rookery.spec import values
from rookery.spec.job import FILE_ENVIRONMENTS, check_hosted_name
from rookery.storage.data_dir import ADMIN_KEY_FILE, read_secret

log = logging.getLogger("rookery.client")

STOP_SECONDS = 5.0
"""Time that a hosted environment has to close its episodes; one that blocks longer ends with the process."""

START_SECONDS = 15.0
"""A job younger than this, of which nothing was sampled, may have a program that is about to host its environment."""

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_DATASETS = {"path": "dataset", "eval_path": "eval_dataset"}
"""Options of an environment of files that name a local one, with the option that names its upload."""

_ROWS = {"rows": "dataset", "eval_rows": "eval_dataset"}
"""Options that are rows, with the option that names them as an upload."""

HASH = re.compile("[0-9a-f]{64}")
"""An uploaded corpus of a tool, which is no path."""

ROWS_BYTES = 256 << 10
"""Rows that are sent within a job, of each option: the body of a request is bounded, that of an upload far higher."""


NEAR_JOBS = 50
"""The newest jobs, among which the one is looked for that a name of none may mean."""

_EARLIER = re.compile(r"~\d+$")
"""The end of a name that means an earlier job."""

PIECE = 1 << 16
"""Bytes of a file that are read at once."""


class EnvironmentServer:
    """Offers ``environment`` to the service at ``url`` as ``name``, in a thread of the user's process, until
    :meth:`stop` or the end of the process, which the thread does not delay."""

    def __init__(self, url: str, key: str, name: str, environment: Environment, ca_file: str = "") -> None:
        self.name = name
        self._host = Host(url, key, {name: environment}, f"{name}-{uuid.uuid4().hex[:12]}", ca_file)
        self._thread = LoopThread(f"environment {name}", self._serve, daemon=True)

    def stop(self) -> None:
        """May be called twice, and from the environment's own thread."""
        self._thread.stop(STOP_SECONDS)

    async def _serve(self, stopping: asyncio.Event) -> None:
        async with first_of(self._host.run(), stopping.wait()) as (hosted, _):
            pass
        if not hosted.cancelled() and (error := hosted.exception()) is not None:
            log.error("environment %s is no longer hosted: %s", self.name, error, exc_info=error)


class Client:
    """A connection to a Rookery service, by default the one on this machine.

    ``url``: else ``ROOKERY_URL``, else the default address. ``key``: else ``ROOKERY_KEY``, else the admin key in the
    data folder, which a service on this machine creates. White space around a key is removed. ``seconds``: the longest
    silence of the service in any request, in place of the limit of its purpose: 10 s of a read, 60 s of a change, 600 s
    of a sample, an upload, a submit.

    Processes that are forked may use a client at the same time. A client, and a job, is pickled and copied as its
    address and key; the copy hosts no environments.

    Raises :class:`~rookery.errors.Unauthorized` if there is no key, :class:`~rookery.errors.Unavailable` if there is no
    key and no service answers, :class:`~rookery.errors.UserError` for an empty key, an address that is none, or
    ``seconds`` that are no number above 0.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        seconds: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        for name, given in (("url", url), ("key", key)):
            if given is not None and not given.strip():
                raise UserError(f"{name}: it is empty; give one, or leave it out")
        settings = settings if settings is not None else Settings.load(uses=CLIENT_SETTINGS)
        where = settings.data / ADMIN_KEY_FILE
        source = "the argument key" if key else "ROOKERY_KEY or --key" if settings.server.key else str(where)
        self._key = (key or settings.server.key or read_secret(settings.data, ADMIN_KEY_FILE) or "").strip()
        self._ca_file = settings.trusted
        address = url or settings.base_url
        self._connection = HttpConnection(address, self._key or None, self._ca_file, key_from=source, seconds=seconds)
        self.url = self._connection.url
        self._hosted: dict[str, EnvironmentServer] = {}
        if not self._key:
            self.health()
            raise Unauthorized(f"no API key for {self.url}: set ROOKERY_KEY (there is no {where} here)")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_hosted": {}}

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def train(
        self,
        *,
        base_model: str,
        environment: Environment | type[Environment] | Mapping[str, Any],
        name: str | None = None,
        new: bool = False,
        **fields: Any,
    ) -> Job:
        """Submit a job. ``environment``: an object or a class, which runs in this process, or a mapping as in a job
        file (``{"hosted": Mine(), "max_turns": 4}`` sets options of an object). ``fields``: the job file's other
        fields, such as ``stop={"steps": 40}``. Raises ``RequestRefused``.

        A program that hosts its environment and is started again continues its job: the newest of that name that has
        not ended and whose environment no process hosts now. Where that job differs from this one, raises
        :class:`~rookery.errors.Conflict`. With ``new`` another job is submitted in any case."""
        wanted: dict[str, Any] = dict(environment) if isinstance(environment, Mapping) else {"hosted": environment}
        hosted = wanted.get("hosted")
        if isinstance(hosted, type) and issubclass(hosted, Environment):
            hosted = hosted()
        by_name = isinstance(environment, Mapping) and isinstance(hosted, str | None)
        if not by_name and not isinstance(hosted, Environment):
            raise UserError(not_an_environment(hosted))
        if not isinstance(hosted, Environment):
            name = name or str(wanted.get("hosted") or wanted.get("id") or "job")
            return self.submit({"name": name, "base_model": base_model, "environment": wanted, **fields})
        name = name or type(hosted).__name__.lower()
        spec = {"name": name, "base_model": base_model, "environment": wanted, **fields}
        earlier = None if new else self._left_behind(name)
        if earlier is not None:
            wanted["hosted"] = earlier.spec.environment.hosted
            if differing := self.differences(earlier.id, spec):
                raise Conflict(
                    f"job {name} ({earlier.id}) has not ended and differs in {', '.join(differing)}; give new=True or"
                    f" another name for a new job, or end it: rookery jobs cancel {earlier.id}"
                )
        server = self._host(name, hosted, None if earlier is None else wanted["hosted"])
        wanted["hosted"] = server.name
        try:
            job = self.submit(spec) if earlier is None else self._continue(earlier)
        except BaseException:
            self._unhost(server)
            raise
        return Job(self._connection, job.id, job.name, on_end=lambda: self._unhost(server))

    def host(self, name: str, environment: Environment | type[Environment]) -> None:
        """Serve an environment under ``name`` from this process until the client is closed: for jobs with
        ``{"hosted": name}``, such as a job whose first process ended (its ``show().spec`` has the name)."""
        try:
            check_hosted_name(name)
        except ValueError as error:
            raise UserError(f"name: {error}") from None
        if name in self._hosted:
            raise UserError(f"this client already offers {name!r}; give another name")
        ours = issubclass(environment, Environment) if isinstance(environment, type) else False
        hosted = environment() if isinstance(environment, type) and ours else environment
        if not isinstance(hosted, Environment):
            raise UserError(not_an_environment(hosted))
        self._hosted[name] = EnvironmentServer(self.url, self._key, name, hosted, self._ca_file)

    def submit(self, spec: Mapping[str, Any], *, folder: Path | None = None, key: str | None = None) -> Job:
        """Submit a job with the fields of a job file. Relative paths start at ``folder``, by default the working
        directory. ``key``: a second submit with the same key returns the existing job. Raises
        ``RequestRefused``."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._job(self._send_job("/api/v1/jobs", spec, folder, headers))

    def dry_run(self, spec: Mapping[str, Any], *, folder: Path | None = None) -> Record:
        """The job with every default filled in and three rendered prompts. Raises ``RequestRefused``."""
        plan: Record = self._send_job("/api/v1/jobs/dry-run", spec, folder, {})
        return plan

    def differences(self, job: str, spec: Mapping[str, Any], *, folder: Path | None = None) -> list[str]:
        """The fields of a job file in which the job with this id differs from ``spec``, such as ``["stop"]``, with the
        names of base models and the files of rows resolved. Raises ``RequestRefused`` where ``spec`` is no valid
        job."""
        found: list[str] = self._send_job(f"/api/v1/jobs/{segment('job', job)}/differences", spec, folder, {})
        return found

    def job(self, id: str) -> Job:
        """The job with this id or name. Of several jobs with one name it is the newest; ``NAME~1`` is the one before
        it. Raises :class:`~rookery.errors.NotFound`."""
        try:
            return self._job(self._connection.call("GET", f"/api/v1/jobs/{segment('job', id)}"))
        except NotFound:
            raise NotFound(f"no job {id!r}; {self._near_job(id)}rookery jobs list shows yours") from None

    def jobs(self) -> list[Job]:
        """All jobs of this key's tenant."""
        return [self._job(view) for view in self.views()]

    def views(self) -> list[Record]:
        """The current state of all jobs, newest first."""
        return list(self._connection.rows("/api/v1/jobs"))

    def runs(self, *, order: str = "created", descending: bool = True, **chosen: Any) -> Record:
        """A page of jobs in short, ``runs``, and how many there are, ``total``; for the administrator's key of all
        tenants. ``chosen``: ``state``, ``text``, ``offset``, ``limit``."""
        params = {"order": order, "descending": descending, **chosen}
        return self._connection.call("GET", "/api/v1/runs", params=params)

    def figures(self) -> Record:
        """Counts of jobs by state, totals since the service started, and gauges of the present."""
        return self._connection.call("GET", "/api/v1/health")

    def uploads(self) -> list[Record]:
        """The datasets (inline rows of jobs too) and adapters that this key's tenant stores, oldest first."""
        return list(self._connection.rows("/api/v1/uploads"))

    def delete_upload(self, hash: str) -> None:
        """Delete a dataset or an adapter. Raises :class:`~rookery.errors.Conflict` where a job that has not ended uses
        it."""
        self._connection.call("DELETE", f"/api/v1/uploads/{segment('upload', hash)}")

    def set_secret(self, name: str, value: str) -> None:
        """Store a text that jobs use by its name, such as the key of a sink, or replace it. It is never shown again."""
        self._connection.call("PUT", f"/api/v1/secrets/{segment('secret', name)}", json={"value": value})

    def secrets(self) -> list[Record]:
        """The names of this tenant's secrets, and when each was set."""
        return list(self._connection.rows("/api/v1/secrets"))

    def delete_secret(self, name: str) -> None:
        """Delete a secret."""
        self._connection.call("DELETE", f"/api/v1/secrets/{segment('secret', name)}")

    def sign_in_link(self) -> str:
        """An address that opens the service's page in a browser, signed in with this key: once, within a minute."""
        return self.url + str(self._connection.call("POST", "/api/v1/sign-in/links").path)

    # --- models and the service ---------------------------------------------------------------------------------------

    def models(self) -> list[Record]:
        """Base models: loaded, known, or refused and why."""
        return self._connection.call("GET", "/api/v1/models")

    def workers(self) -> list[Record]:
        """The workers, in any state; for the administrator's key."""
        return self._connection.call("GET", "/api/v1/workers")

    def timeline(self, start: float | None = None, end: float | None = None) -> Record:
        """The work of workers, environments and the trainer between two Unix times, by default the last ten minutes:
        ``spans`` with their kind, start, end, worker, job and policy."""
        return self._connection.call("GET", "/api/v1/timeline", params=times(start, end))

    def trace(
        self, file: str | Path, start: float | None = None, end: float | None = None, seconds: float | None = None
    ) -> Path:
        """Writes the timeline as a trace, which https://ui.perfetto.dev opens; returns ``file``. Without ``start``, of
        the last ``seconds`` before ``end`` or the service's present, or of all the time that is kept."""
        return write_trace(self._connection, "/api/v1/timeline/trace", file, times(start, end, seconds))

    def pools(self) -> list[Record]:
        """The number of rollout workers of each base model, and the wanted one; for the administrator's key."""
        return self._connection.call("GET", "/api/v1/workers/pools")

    def tenants(self) -> list[Record]:
        """Every tenant; for the administrator's key, as are the methods below."""
        return list(self._connection.rows("/api/v1/tenants"))

    def add_tenant(self, name: str) -> Record:
        """Create a tenant. Raises :class:`~rookery.errors.Conflict` where another one has the name."""
        return self._connection.call("POST", "/api/v1/tenants", json={"name": name})

    def rename_tenant(self, tenant: str, name: str) -> Record:
        """Give a tenant another name."""
        return self._connection.call("PATCH", f"/api/v1/tenants/{self._tenant(tenant)}", json={"name": name})

    def delete_tenant(self, tenant: str, *, force: bool = False) -> None:
        """Delete a tenant with its keys, jobs and uploads; its costs stay. ``force`` cancels jobs that have not ended.
        Raises :class:`~rookery.errors.Conflict` where there are such jobs."""
        path = f"/api/v1/tenants/{self._tenant(tenant)}"
        self._connection.call("DELETE", path, params={"force": force})

    def limit_tenant(self, tenant: str, **limits: float | None) -> Record:
        """Change limits of a tenant: jobs, waiting_jobs, requests, request_tokens, queued_bytes, adapters, bytes,
        tokens_per_day, models, hosts, metadata_bytes, uploads, database_bytes, service_share, requests_per_second,
        weight. None is the service's setting."""
        path = f"/api/v1/tenants/{self._tenant(tenant)}/limits"
        return self._connection.call("PUT", path, json=limits)

    def keys(self, tenant: str) -> list[Record]:
        """A tenant's keys: ids and labels, never their texts. ``tenant``: its id or name."""
        return list(self._connection.rows(f"/api/v1/tenants/{self._tenant(tenant)}/keys"))

    def add_key(
        self, tenant: str, label: str = "", *, role: str | None = None, lifetime_seconds: float | None = None
    ) -> Record:
        """A new key; its text is returned only here. ``role``: admin, tenant, worker or host; None is all of the
        tenant's."""
        path = f"/api/v1/tenants/{self._tenant(tenant)}/keys"
        wanted = {"label": label, "role": role, "lifetime_seconds": lifetime_seconds}
        return self._connection.call("POST", path, json=wanted)

    def revoke_key(self, tenant: str, key: str) -> Record:
        """Revoke the key with this id."""
        path = f"/api/v1/tenants/{self._tenant(tenant)}/keys/{segment('key', key)}"
        return self._connection.call("DELETE", path)

    def costs(self) -> Record:
        """The costs of every tenant (``tenants``) and of the workers (``workers``)."""
        return self._connection.call("GET", "/api/v1/costs")

    def sample(self, target: str, messages: list[dict[str, str]] | str, **sampling: Any) -> Record:
        """One completion. ``target``: a base model, ``JOB`` or ``JOB@VERSION``; ``sampling``: max_tokens, temperature,
        seed, stop. Returns text, tokens, logprobs, finish, version."""
        return sample(self._connection, target, messages, **sampling)

    def stream(self, target: str, messages: list[dict[str, str]] | str, **sampling: Any) -> Iterator[str]:
        """The text of one completion in chunks as it is sampled. Closing the iterator ends the generation."""
        return stream(self._connection, target, messages, **sampling)

    def health(self) -> Record:
        """Raises :class:`~rookery.errors.Unavailable` if no Rookery service answers."""
        found = self._connection.call("GET", "/healthz")
        if not isinstance(found, dict) or found.get("service") != "rookery":
            raise Unavailable(f"the server at {self.url} is not a Rookery service; set ROOKERY_URL")
        return Record(found)

    # --- the client itself --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the environments hosted here and close the connection. Jobs continue; those whose environment was here
        pause."""
        for server in list(self._hosted.values()):
            self._unhost(server)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tenant(self, wanted: str) -> str:
        """The id of the tenant with this id or name. Raises :class:`~rookery.errors.NotFound`."""
        rows = self.tenants()
        found = [row.id for row in rows if row.id == wanted] or [row.id for row in rows if row.name == wanted]
        if not found:
            near = _near(wanted, (row.name for row in rows))
            raise NotFound(f"no tenant {wanted!r}; {near}rookery tenants list shows them")
        if len(found) > 1:
            raise Conflict(f"{count_of(len(found), 'tenant')} have the name {wanted!r}; give an id: {', '.join(found)}")
        return str(found[0])

    def _near_job(self, wanted: str) -> str:
        """The beginning of an advice: the job that a name of none may mean."""
        with suppress(RookeryError):  # the advice alone is lost
            newest = self._connection.call("GET", "/api/v1/jobs", params={"limit": NEAR_JOBS})
            name = _EARLIER.sub("", wanted)
            return _near(name, [*dict.fromkeys(view.name for view in newest), *(view.id for view in newest)])
        return ""

    def _send_job(self, path: str, spec: Mapping[str, Any], folder: Path | None, headers: dict[str, str]) -> Any:
        """The service's answer to a job. Raises :class:`~rookery.errors.UserError` for a value that is not JSON."""
        if not isinstance(spec, Mapping):
            raise UserError(
                f"a job is a mapping; given {type(spec).__name__}: read a file with rookery.spec.files.read_job, or:"
                " rookery run FILE"
            )
        sent = _upload_files(self._connection, spec, folder if folder is not None else Path())
        try:
            content = values.encode(sent)
        except ValueError as error:
            raise UserError(f"the job is refused: {error}") from None
        headers = {**headers, "Content-Type": "application/json"}
        return self._connection.call("POST", path, content=content, headers=headers, seconds=WORK_SECONDS)

    def _job(self, view: Record) -> Job:
        return Job(self._connection, view.id, view.name)

    def _left_behind(self, name: str) -> Record | None:
        """The newest job of this name that has not ended, and whose environment a process hosted that is gone."""
        offered = re.compile(re.escape(name) + r"-[0-9a-f]{8}")
        for view in self.views():
            if view.name != name or view.state in ENDED or view.hosted is not False:
                continue
            age = self._connection.service_now() - view.created
            began = view.state == "paused" or view.step or view.tokens or age > START_SECONDS
            host = view.spec.environment.hosted
            if began and offered.fullmatch(host) and host not in self._hosted:
                return view
        return None

    def _continue(self, view: Record) -> Job:
        """The job, resumed unless its owner paused it."""
        job = self._job(view)
        log.info("job %s (%s) continues at step %d; new=True starts another one", view.name, view.id, view.step)
        if view.state == "paused" and view.paused_by != "owner":
            job.resume()
        return job

    def _host(self, name: str, environment: Environment, known: str | None = None) -> EnvironmentServer:
        """Under a unique name, or that of an earlier job: two programs that train a class of the same name at the same
        time never serve each other's jobs."""
        unique = known or f"{name}-{uuid.uuid4().hex[:8]}"
        self._hosted[unique] = EnvironmentServer(self.url, self._key, unique, environment, self._ca_file)
        return self._hosted[unique]

    def _unhost(self, server: EnvironmentServer) -> None:
        self._hosted.pop(server.name, None)
        server.stop()


def _near(wanted: str, known: Iterable[str]) -> str:
    """The beginning of an advice; empty where no known name is near."""
    hint = nearest(wanted, known)
    return f"{hint} " if hint else ""


def not_an_environment(given: object) -> str:
    """The advice about an object that was given as an environment and is none."""
    kind = given if isinstance(given, type) else type(given)
    if isinstance(given, str):
        name = values.escaped(given)
        return f'environment: given {name}; give {{"id": {name}}} for a built-in, {{"hosted": {name}}} for one of yours'
    if kind.__module__ == "builtins":
        shown = short(repr(given))
        return f'environment: given {shown}; give a rookery.Environment, or a mapping such as {{"id": "jsonl"}}'
    return (
        f"environment: the class {kind.__name__} does not derive from rookery.Environment; write"
        f" class {kind.__name__}(rookery.Environment)"
    )


def _add_dataset(connection: HttpConnection, content: bytes | Iterator[bytes], size: int | None = None) -> str:
    """Uploads rows, or the pieces of a JSONL file of ``size`` bytes, None where that is not known; returns the hash for
    ``environment.dataset``."""
    headers = {} if size is None else {"Content-Length": str(size)}
    path = "/api/v1/datasets"
    return str(connection.call("POST", path, content=content, headers=headers, seconds=WORK_SECONDS)["dataset"])


def _add_dataset_file(connection: HttpConnection, path: Path, option: str) -> str:
    """Uploads a file, which ``option`` of the job names, as it is read. A pipe has no size, nor have files that a
    system makes when they are read."""
    where = f"environment.{option}: {path}"
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if stat.S_ISCHR(about.st_mode) or stat.S_ISBLK(about.st_mode):
                raise UserError(f"{where} is a device; give a file, or a pipe")
            size = about.st_size if stat.S_ISREG(about.st_mode) and about.st_size else None
            return _add_dataset(connection, pieces(file, where, size), size)
    except OSError as error:
        reason = f"({error.strerror}); give a JSONL file, whose path starts at the folder of the job file"
        raise UserError(f"{where} cannot be read {reason}") from None
    except RequestRefused as error:  # the service knows the rows, not the file
        problems = [f"{where}: {line.removeprefix('dataset: ')}" for line in error.problems]
        raise RequestRefused("\n".join(problems), problems) from None


def pieces(file: IO[bytes], where: str, size: int | None) -> Iterator[bytes]:
    """The content of a file. Raises :class:`UserError` where it is not of the known size."""
    read = 0
    while piece := file.read(PIECE):
        read += len(piece)
        if size is not None and read > size:
            break
        yield piece
    if size is not None and read != size:
        raise UserError(f"{where} changed while it was sent; submit again when it is whole")


def _large_rows(option: str, rows: Any) -> bytes | None:
    """The rows of an option as a JSONL file, if they have more than :data:`ROWS_BYTES`; others are left for the service
    to check. Raises :class:`UserError`."""
    lines, problem = [], ""
    for number, row in enumerate(rows if isinstance(rows, list | tuple) else ()):
        try:
            lines.append(values.encode(row) + b"\n")
        except values.ValueRefused:
            problem = problem or next(values.problems(row, f"environment.{option}.{number}"), "")
    if sum(map(len, lines)) <= ROWS_BYTES:
        return None
    if problem:
        raise UserError(problem)
    return b"".join(lines)


def _add_adapter(connection: HttpConnection, folder: Path) -> str:
    """Uploads a PEFT folder; returns the hash for ``warm_start.upload``."""
    with temporary_file() as tar, temporary_errors():
        with tarfile.open(fileobj=tar, mode="w", dereference=True) as archive:
            for name in _ADAPTER_FILES:
                try:
                    archive.add(folder / name, name)
                except OSError as error:
                    if error.errno in NO_ROOM:  # of the archive
                        raise
                    raise UserError(f"warm_start.peft: {folder / name} cannot be read ({error.strerror})") from None
        tar.seek(0)
        return str(connection.call("POST", "/api/v1/adapters", content=tar, seconds=WORK_SECONDS)["adapter"])


def _upload_files(connection: HttpConnection, spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Uploads the files that ``spec`` names; returns it with their hashes instead of their paths. Relative paths start
    at ``folder``. A value that is not a path is left for the service to refuse."""
    sent, environment = dict(spec), spec.get("environment")
    if isinstance(environment, dict) and environment.get("id") in FILE_ENVIRONMENTS:
        environment = sent["environment"] = dict(environment)
        for given, sent_as in _DATASETS.items():
            if isinstance(environment.get(given), str):
                environment[sent_as] = _add_dataset_file(connection, folder / named_path(environment.pop(given)), given)
        tools = environment.get("tools")
        if isinstance(tools, list):
            tools = environment["tools"] = [dict(tool) if isinstance(tool, dict) else tool for tool in tools]
        for number, tool in enumerate(tools) if isinstance(tools, list) else ():
            if isinstance(tool, dict) and isinstance(tool.get("index"), str) and not HASH.fullmatch(tool["index"]):
                tool["index"] = _add_dataset_file(
                    connection, folder / named_path(tool["index"]), f"tools.{number}.index"
                )
        for given, sent_as in _ROWS.items():
            content = _large_rows(given, environment.get(given))
            if content is not None and sent_as not in environment:
                del environment[given]
                environment[sent_as] = _add_dataset(connection, content)
    policies = sent.get("policies")
    for name, policy in policies.items() if isinstance(policies, dict) else ():
        start = policy.get("warm_start") if isinstance(policy, dict) else None
        if isinstance(start, dict) and isinstance(start.get("peft"), str):
            start = {**start, "upload": _add_adapter(connection, folder / named_path(start["peft"]))}
            del start["peft"]
            sent["policies"] = {**sent["policies"], name: {**policy, "warm_start": start}}
    return sent
