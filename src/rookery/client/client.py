"""The way in: find the service and the key, submit jobs, host environments."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

from rookery.client.connection import Connection, Record
from rookery.client.hosting import Hosting
from rookery.client.job import Job, sample, stream
from rookery.client.uploads import uploaded
from rookery.environments.base import Environment
from rookery.errors import Conflict, NotFound, Unauthorized, Unavailable, UserError
from rookery.settings import Settings
from rookery.storage.data_dir import ADMIN_KEY_FILE, read_secret


class Client:
    """A connection to a Rookery service, by default the one on this machine.

    ``url``: else ``ROOKERY_URL``, else the default address. ``key``: else ``ROOKERY_KEY``, else the admin key in the
    data folder, which a service on this machine makes. Raises :class:`~rookery.errors.Unauthorized` where there is no
    key to use, :class:`~rookery.errors.Unavailable` where there is none because no service runs. Space around a key is
    none of it: one that was read from a file has its newline.
    """

    def __init__(self, url: str | None = None, key: str | None = None, *, settings: Settings | None = None) -> None:
        settings = settings if settings is not None else Settings.load()
        self.url = (url or settings.base_url).rstrip("/")
        self._key = (key or settings.server.key).strip() or read_secret(settings.data, ADMIN_KEY_FILE) or ""
        self._connection = Connection(self.url, self._key or None)
        self._hosted: dict[str, Hosting] = {}
        if not self._key:
            self.health()
            where = settings.data / ADMIN_KEY_FILE
            raise Unauthorized(f"no API key for {self.url}: set ROOKERY_KEY (there is no {where} here)")

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def train(
        self,
        *,
        base_model: str,
        environment: Environment | type[Environment] | Mapping[str, Any],
        name: str | None = None,
        **parts: Any,
    ) -> Job:
        """Submit a job. ``environment``: an object or class of yours, which runs in this process, or a mapping as in a
        job file (``{"hosted": Mine(), "max_turns": 4}`` gives options to yours). ``parts``: the job file's other
        fields, like ``stop={"steps": 40}``. Raises :class:`Refused`."""
        wanted: dict[str, Any] = dict(environment) if isinstance(environment, Mapping) else {"hosted": environment}
        own = wanted.get("hosted")
        if isinstance(own, type) and issubclass(own, Environment):
            own = own()
        if not isinstance(own, Environment):
            name = name or str(wanted.get("hosted") or wanted.get("id") or "job")
            return self.submit({"name": name, "base_model": base_model, "environment": wanted, **parts})
        name = name or type(own).__name__.lower()
        hosting = self._host(name, own)
        wanted["hosted"] = hosting.name
        try:
            job = self.submit({"name": name, "base_model": base_model, "environment": wanted, **parts})
        except BaseException:
            self._unhost(hosting)
            raise
        return Job(self._connection, job.id, job.name, ended=lambda: self._unhost(hosting))

    def host(self, name: str, environment: Environment | type[Environment]) -> None:
        """Offer an environment under ``name``, in this process, until the client is closed: for jobs that say
        ``{"hosted": name}``, such as one whose own process ended (its ``show().spec`` has the name)."""
        if name in self._hosted:
            raise UserError(f"this client offers {name!r} already; give another name")
        own = environment() if isinstance(environment, type) else environment
        self._hosted[name] = Hosting(self.url, self._key, name, own)

    def submit(self, spec: Mapping[str, Any], *, folder: Path | None = None, key: str | None = None) -> Job:
        """Submit a job as a job file has it. Relative paths in it start at ``folder``, the working directory unless
        given. ``key``: submitting again under the same one gives the job that it made the first time. Raises
        :class:`Refused`."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        sent = uploaded(self._connection, spec, folder if folder is not None else Path())
        return self._job(self._connection.call("POST", "/api/v1/jobs", json=sent, headers=headers))

    def dry_run(self, spec: Mapping[str, Any], *, folder: Path | None = None) -> Record:
        """What the job would be: every default filled in, three prompts rendered. Raises :class:`Refused`."""
        sent = uploaded(self._connection, spec, folder if folder is not None else Path())
        resolved: Record = self._connection.call("POST", "/api/v1/jobs/dry-run", json=sent)
        return resolved

    def job(self, id: str) -> Job:
        """The job with this id, or the only one with this name. Raises :class:`~rookery.errors.NotFound`."""
        views = self.views()
        found = [view for view in views if view.id == id] or [view for view in views if view.name == id]
        if not found:
            raise NotFound(f"no job {id!r}; rookery jobs list shows yours")
        if len(found) > 1:
            raise Conflict(f"{len(found)} jobs are called {id!r}; give one's id: {', '.join(v.id for v in found)}")
        return self._job(found[0])

    def jobs(self) -> list[Job]:
        """All jobs of this key's tenant."""
        return [self._job(view) for view in self.views()]

    def views(self) -> list[Record]:
        """The same as they are now, in one request."""
        found: list[Record] = self._connection.call("GET", "/api/v1/jobs")
        return found

    # --- models and the service ---------------------------------------------------------------------------------------

    def models(self) -> list[Record]:
        """Base models: loaded, known, or refused and why."""
        found: list[Record] = self._connection.call("GET", "/api/v1/models")
        return found

    def workers(self) -> list[Record]:
        """The workers, in whatever state; for the administrator's key."""
        found: list[Record] = self._connection.call("GET", "/api/v1/workers")
        return found

    def tenants(self) -> list[Record]:
        """Every tenant; this and what follows is for the administrator's key."""
        found: list[Record] = self._connection.call("GET", "/api/v1/tenants")
        return found

    def add_tenant(self, name: str) -> Record:
        made: Record = self._connection.call("POST", "/api/v1/tenants", json={"name": name})
        return made

    def keys(self, tenant: str) -> list[Record]:
        """A tenant's keys by their ids: never their texts. ``tenant``: its id, or its name where only one is called
        so."""
        found: list[Record] = self._connection.call("GET", f"/api/v1/tenants/{self._tenant(tenant)}/keys")
        return found

    def add_key(self, tenant: str, label: str = "") -> Record:
        """A new key; its text is in the answer and never again."""
        path = f"/api/v1/tenants/{self._tenant(tenant)}/keys"
        made: Record = self._connection.call("POST", path, json={"label": label})
        return made

    def revoke_key(self, tenant: str, key: str) -> Record:
        """The key with this id opens nothing any more."""
        path = f"/api/v1/tenants/{self._tenant(tenant)}/keys/{quote(key, safe='')}"
        gone: Record = self._connection.call("DELETE", path)
        return gone

    def costs(self) -> Record:
        """What every tenant used (``tenants``), and what the workers cost (``workers``)."""
        found: Record = self._connection.call("GET", "/api/v1/costs")
        return found

    def sample(self, target: str, messages: list[dict[str, str]] | str, **sampling: Any) -> Record:
        """One completion. ``target``: a base model, ``JOB`` or ``JOB@VERSION``; ``sampling``: max_tokens, temperature,
        seed, stop. Answers text, tokens, logprobs, finish, version."""
        return sample(self._connection, target, messages, **sampling)

    def stream(self, target: str, messages: list[dict[str, str]] | str, **sampling: Any) -> Iterator[str]:
        """The text of one completion, piece by piece as it is sampled. Left early, its generation ends."""
        return stream(self._connection, target, messages, **sampling)

    def health(self) -> Record:
        """Raises :class:`~rookery.errors.Unavailable` where no Rookery service answers."""
        found = self._connection.call("GET", "/healthz")
        if not isinstance(found, dict) or found.get("service") != "rookery":
            raise Unavailable(f"what answers at {self.url} is no Rookery service; set ROOKERY_URL")
        return Record(found)

    # --- the client itself --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the environments hosted here and the connection. Jobs go on; those whose environment was here pause."""
        for hosting in list(self._hosted.values()):
            self._unhost(hosting)
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
            raise NotFound(f"no tenant {wanted!r}; rookery tenants list shows them")
        if len(found) > 1:
            raise Conflict(f"{len(found)} tenants are called {wanted!r}; give one's id: {', '.join(found)}")
        return str(found[0])

    def _job(self, view: Record) -> Job:
        return Job(self._connection, view.id, view.name)

    def _host(self, name: str, environment: Environment) -> Hosting:
        """Under a name of its own: two programs that train a class of the same name never serve each other's jobs."""
        own = f"{name}-{uuid.uuid4().hex[:8]}"
        self._hosted[own] = Hosting(self.url, self._key, own, environment)
        return self._hosted[own]

    def _unhost(self, hosting: Hosting) -> None:
        self._hosted.pop(hosting.name, None)
        hosting.stop()
