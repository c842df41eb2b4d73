"""Starts and stops a service: data folder, database, controller, HTTP server and local processes.

* A start is complete or has no effect: after a failure, everything already started is stopped, and the error is one
  line.
* A stop happens in the reverse order and leaves nothing running but reads of the database and requests to a store or a
  sink that hang, for which it does not wait. It waits for the writes to the database, however long they take, as their
  claim ends after them. Jobs resume at the next start. However this process ends, its child processes end with it.
* Two services can run in one process: nothing is global except logging, which is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn

from rookery import protocol
from rookery.aio import (
    LoopThread,
    cancel_all,
    close_within,
    first_of,
    in_new_thread,
    on_end_signals,
    prefer_event_loop,
    restarting,
    unless,
)
from rookery.clock import RandomIds, SystemClock
from rookery.cluster.base import Cluster
from rookery.cluster.local import ProcessCluster
from rookery.cluster.supervisor import Spawn
from rookery.controller.completions import ANSWER_TOKENS
from rookery.controller.controller import Controller
from rookery.controller.job_sinks import SINK_RULES, SinkRules, parse_sinks
from rookery.controller.options import ControllerOptions, LocalWorkers
from rookery.controller.planned import plan_to_follow
from rookery.controller.rollout.rules import ROLLOUT_RULES, RolloutRules
from rookery.controller.services import Services, Threads
from rookery.controller.sessions.rules import SESSION_RULES, SessionRules
from rookery.environments.checks import EnvironmentChecks
from rookery.environments.foreign.games import parse_games
from rookery.environments.foreign.verifiers import parse_verifiers
from rookery.environments.judges import parse_judges
from rookery.environments.rules import EnvironmentRules
from rookery.environments.sandbox.sandbox import find as find_sandbox
from rookery.errors import RookeryError, Unavailable, UserError, count_of, short, shortages, to_stderr, unusable
from rookery.folders import usable_cache
from rookery.network import FollowingContext, dialled_host, join_address
from rookery.server.app import build, standby
from rookery.server.auth import REFUSALS, Checks, Credentials, FailedKeys, Keys, ServiceContext
from rookery.server.base_models import BaseModels
from rookery.server.connections import (
    ACCEPTED_AT_ONCE,
    EDGE_RULES,
    BoundedHttp,
    BoundedWebSocket,
    Connections,
    EdgeRules,
)
from rookery.server.grader_trials import GraderTrials
from rookery.server.readiness import Readiness
from rookery.server.schema_checks import SchemaChecks
from rookery.server.signin import SignIns
from rookery.settings import ClusterSettings, ServerSettings, Settings, variable_notes
from rookery.spec.fleet import Plan
from rookery.storage.artifacts import Artifacts, Place
from rookery.storage.data_dir import ADMIN_KEY_FILE, WORKER_TOKEN_FILE, DataFolder, hash_key
from rookery.storage.db import Database, DatabaseInUse
from rookery.storage.models import KeyRole
from rookery.storage.opening import artifacts_at, open_artifacts
from rookery.storage.place import HOLD_SECONDS, STORE_RULES, WATCH_SECONDS, Lease, PlaceInUse, StoreRules, incarnation
from rookery.storage.repositories import tenants
from rookery.storage.store import StorageWriter, Store, TransferThreads
from rookery.telemetry.log import file_handler, logging_to, terminal_handler
from rookery.telemetry.metrics import check_sinks
from rookery.tenant_loop import TenantLoop
from rookery.tokenization.registry import resolve, usable
from rookery.turns import TenantThreads

log = logging.getLogger("rookery.server")
T = TypeVar("T")

KEEP_ALIVE_SECONDS = 75
"""Lifetime of an idle connection: longer than clients keep theirs, so that the client closes it."""

BACKLOG = 2048
"""Connections that may wait to be accepted."""

STANDBY_STOP_SECONDS = 1
"""Time that the responses of a standby have when it takes over: it has the database already, and a client that reads
none must not delay it until its claim lapses."""

STANDBY_SECONDS = 0.2
"""Time between two attempts of a standby to claim the database."""

READERS, WORKERS, ENCODERS, OPENERS = 4, 4, 4, 4
"""Threads that read the database, that do blocking work for tenants, that encode responses, and that open and read
files of artifacts; one of each is the service's own. A tenant's long call in one line delays none of its others."""

TRANSFERS = 6
"""Tenants whose artifacts are stored, verified and deleted at the same time, less one. One that the place of the
artifacts keeps waiting, or with gigabytes, holds up none of the others; a file in an object store takes up to 20 MB of
memory on its way there."""

CHECKERS = 5
"""Tenants whose environments and datasets are checked at the same time, less one. Each check is a process; that of a
large dataset takes minutes, for which the jobs of few other tenants may wait."""

SENDERS = 16
"""Tenants whose sinks are written at the same time, less one, in separate threads: a slow sink delays nothing
else."""

CLAIM_SECONDS = 5.0
"""Interval at which a service renews its claim on the database and its lease on the artifacts."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers; ``up`` is set when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@dataclass(frozen=True, kw_only=True)
class ServiceRules:
    """Tuned values of a service that no setting changes; tests and experiments pass others."""

    edge: EdgeRules = EDGE_RULES
    rollouts: RolloutRules = ROLLOUT_RULES
    sessions: SessionRules = SESSION_RULES
    sinks: SinkRules = SINK_RULES
    stores: StoreRules = STORE_RULES
    answer_tokens: int = ANSWER_TOKENS
    claim_seconds: float = CLAIM_SECONDS
    spawn: Spawn | None = None
    """Starts workers and environment hosts; None: as processes of this machine, each with a new interpreter."""
    checks: Callable[[EnvironmentRules], EnvironmentChecks] = EnvironmentChecks


@dataclass(frozen=True)
class _Storage:
    """The claimed database and the artifacts that the service holds."""

    database: Database
    artifacts: Artifacts
    lease: Lease
    writer: StorageWriter


class _Pools:
    """The threads of blocking calls."""

    def __init__(self, opened: AsyncExitStack) -> None:
        """They end with ``opened``."""
        self.transfers = TransferThreads(TRANSFERS)
        self.readers, work = TenantThreads(READERS, "reader"), TenantThreads(WORKERS, "work")
        encoders, openers = TenantThreads(ENCODERS, "encode"), TenantThreads(OPENERS, "open")
        checkers, senders = TenantThreads(CHECKERS, "check"), TenantThreads(SENDERS, "sink")
        self.threads = Threads(work=work, encoders=encoders, openers=openers, checkers=checkers, senders=senders)
        self.charged = (self.readers, work, encoders, openers)
        """The pools whose processor time counts as their tenants'."""
        for close, calls in (
            (self.readers.close, "reads"), (work.close, "work of tenants"), (encoders.close, "responses"),
            (openers.close, "reads of artifacts"), (checkers.close, "checks"), (senders.close, "sinks"),
            (self.transfers.close, "artifacts"),
        ):  # fmt: skip
            opened.push_async_callback(close_within, close, calls)


class Service:
    """A Rookery service. ``url`` and ``admin_key`` are set once it has started."""

    def __init__(
        self,
        settings: Settings,
        handlers: list[logging.Handler] | None = None,
        rules: ServiceRules | None = None,
        *,
        may_wait: bool = True,
    ) -> None:
        """``handlers`` receive the log lines in addition to the file in the data folder. ``may_wait``: it may be the
        standby of a service that has its database."""
        self.settings = settings
        self._may_wait = may_wait
        self._rules = rules or ServiceRules()
        self.url = ""
        self.admin_key = ""
        self._handlers = handlers or []
        self._clock, self._ids = SystemClock(), RandomIds()
        self._stack = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None
        self._claiming: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def start(self) -> None:
        """Raises :class:`UserError` for a problem that a person can fix: the port, the data folder, a setting;
        :class:`Unavailable` where a later start can succeed, such as one after the start of the database."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """Everything that :meth:`start` started has ended when this returns."""
        self._closing.set()
        await self._stack.aclose()

    async def serving(self) -> None:
        """Wait until the service fails, because the HTTP server ended or the database was lost, and raise the error."""
        assert self._serving is not None and self._claiming is not None
        tasks = (self._serving, self._claiming)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError("the HTTP server ended by itself")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.stop()

    async def _start(self) -> None:
        plan = check_settings(self.settings)
        usable_cache(self.settings.cache)
        models = [resolve(name.strip()).name for name in self.settings.server.models.split(",") if name.strip()]
        settings = self.settings.replace(models=",".join(models))
        for model in models:
            usable(settings.cache, model, settings.engine.inference_engine, settings.training.trainer)
        opened = self._stack
        folder = opened.enter_context(DataFolder(settings.data))
        handlers = [*self._handlers, file_handler(folder.logs / "service.jsonl")]
        opened.enter_context(logging_to(handlers, settings.server.log_level))
        listening = opened.enter_context(_listen(settings.server.host, settings.server.port))
        tls = _tls(settings.server)
        scheme = "http" if tls is None else "https"
        self.url = join_address(scheme, dialled_host(settings.server.host), listening.getsockname()[1])

        refusals = Counter(dict.fromkeys(REFUSALS, 0))
        connections = Connections(settings.edge.connections, refusals, self._rules.edge, tls)
        storage = await self._open_storage(settings.server, folder, connections, listening)
        database, artifacts = storage.database, storage.artifacts
        self.admin_key, worker_token = folder.admin_key(), folder.worker_token()
        await asyncio.to_thread(_register_keys, database, folder, self._ids.new("tenant"), self._clock.time())
        pools = _Pools(opened)
        checks = self._open_checks(settings.server)
        base_models = BaseModels(settings.cache)
        opened.push_async_callback(base_models.close)

        cluster: Cluster = ProcessCluster(
            settings,
            self.url,
            worker_token,
            lambda *failure: controller.model_failed(*failure),
            lambda reason: controller.host_failed(reason),
            spawn=self._rules.spawn,
        )
        controller = Controller(
            Services(
                settings=settings,
                clock=self._clock,
                ids=self._ids,
                store=Store(database, storage.writer, pools.transfers, pools.readers),
                artifacts=artifacts,
                chat=base_models.chat,
                threads=pools.threads,
            ),
            check_environment=checks.environments.validate,
            jobs_folder=folder.jobs,
            options=ControllerOptions(
                workers=LocalWorkers(provide=cluster.provide, release=cluster.release, scale=cluster.scale),
                plan=plan,
                rollout_rules=self._rules.rollouts,
                session_rules=self._rules.sessions,
                sink_rules=self._rules.sinks,
                answer_tokens=self._rules.answer_tokens,
            ),
        )
        quotas = controller.context.rooms.quotas
        for pool in pools.charged:
            pool.spent = quotas.service_time.spend
        checks.schemas.spent = quotas.service_time.spend
        if isinstance(loop := asyncio.get_running_loop(), TenantLoop):
            loop.spent = quotas.spend_on_jobs
        opened.enter_context(controller.record.sampled())
        opened.push_async_callback(controller.stop)
        await controller.start()

        keys = Keys(database, self._clock)
        opened.push_async_callback(close_within, keys.close, "reads of keys")
        context = ServiceContext(
            controller=controller,
            connections=connections,
            credentials=Credentials(
                keys=keys,
                failures=FailedKeys(
                    self._rules.edge.failed_keys_per_minute, map(hash_key, (self.admin_key, worker_token))
                ),
                signins=SignIns(self._clock, hmac.digest(self.admin_key.encode(), b"sign in to the page", "sha256")),
            ),
            checks=checks,
            readiness=Readiness(partial(in_new_thread, database.ping), self._clock),
            refusals=refusals,
            closing=self._closing,
        )
        stop_seconds = max(1, round(settings.server.stop_seconds))
        self._serving = await self._serve(opened, build(context), listening, stop_seconds)
        self._claiming = asyncio.create_task(self.renew_claim(database), name="claim")
        opened.push_async_callback(cancel_all, self._claiming)
        watch = asyncio.create_task(restarting(partial(connections.watch, self._clock), self._clock), name="expiry")
        opened.push_async_callback(cancel_all, watch)
        opened.push_async_callback(
            cancel_all,
            asyncio.create_task(renew_hold(artifacts, storage.lease, self._rules.claim_seconds), name="holder"),
        )
        opened.push_async_callback(cluster.stop)  # runs first, so that workers can send their results
        await cluster.start()

    async def _open_storage(
        self, settings: ServerSettings, folder: DataFolder, connections: Connections, listening: socket.socket
    ) -> _Storage:
        """Claim the database, which may mean to wait as a standby, and hold the place of its artifacts."""
        opened = self._stack
        database = Database(settings.database or folder.database_url)
        opened.callback(database.close)
        place, stores = Place(*settings.artifacts), self._rules.stores
        await asyncio.to_thread(_check_place, database, place, folder, stores)
        await self._claim(database, connections, listening)
        await asyncio.to_thread(database.create)
        artifacts = await asyncio.to_thread(open_artifacts, place, folder.artifacts, database.owner(), stores)
        service = incarnation(self._ids.new("service"), self.url, folder.root, [*folder.locks, *database.locks])
        lease, writer = Lease(service, database.ended), StorageWriter()
        opened.push_async_callback(close_within, artifacts.release, "the lease on the artifacts")
        await _hold(artifacts, lease)
        await asyncio.to_thread(database.used_place, artifacts.where, service.id)
        opened.callback(writer.close)
        return _Storage(database, artifacts, lease, writer)

    def _open_checks(self, settings: ServerSettings) -> Checks:
        """Their processes end before the threads that wait for them: a check that runs fails."""
        environments, schemas = self._rules.checks(EnvironmentRules.of(settings)), SchemaChecks()
        graders = GraderTrials(settings.sandbox, settings.judges)
        self._stack.callback(environments.close)
        self._stack.callback(schemas.close)
        self._stack.push_async_callback(graders.close)
        return Checks(environments=environments, schemas=schemas, graders=graders)

    async def _claim(self, database: Database, connections: Connections, listening: socket.socket) -> None:
        """Claim the database. Where another service has it and artifacts are shared, wait until that one ends."""
        try:
            await asyncio.to_thread(database.claim)
            return
        except Unavailable as error:
            kind: type[RookeryError] = UserError if database.stays_away(error) else Unavailable
            raise kind(f"the database cannot be opened: {error.detail or error}") from None
        except DatabaseInUse:
            if not (self._may_wait and self.settings.server.artifacts_url):
                raise
        log.warning("standby at %s: another service has the database; this one takes over when it ends", self.url)
        async with AsyncExitStack() as waiting:
            await self._serve(waiting, standby(connections), listening, STANDBY_STOP_SECONDS)
            while True:
                try:
                    with shortages():  # a flood can leave it without descriptors or memory for a while
                        await asyncio.to_thread(database.claim)  # waits for the other service for a while
                    break
                except DatabaseInUse:
                    await asyncio.sleep(STANDBY_SECONDS)
                except Unavailable:
                    await asyncio.sleep(self._rules.claim_seconds)
        log.warning("the other service has ended: this one takes over")

    async def renew_claim(self, database: Database) -> None:
        """Renew the claim on the database. Raises :class:`Unavailable` when another service has claimed it while it
        could not be reached from here: started again, this one can be its standby."""
        while True:
            await asyncio.sleep(self._rules.claim_seconds)
            try:
                with contextlib.suppress(Unavailable), shortages():  # callers of the database report it
                    await in_new_thread(database.claim)
            except DatabaseInUse as error:
                raise Unavailable(str(error)) from None

    @staticmethod
    async def _serve(
        opened: AsyncExitStack, app: Any, listening: socket.socket, stop_seconds: int
    ) -> asyncio.Task[None]:
        """Serve ``app`` on the listening socket, which stays open, until ``opened`` ends; requests that are open then
        have ``stop_seconds``."""
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=BoundedHttp,
            ws=BoundedWebSocket,
            backlog=ACCEPTED_AT_ONCE,
            ws_max_size=protocol.MAX_FRAME,
            ws_per_message_deflate=False,  # frames are small and frequent
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=stop_seconds,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listening.dup()]), name="http")

        async def end() -> None:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)

        opened.push_async_callback(end)
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            serving.result()
            raise RuntimeError("the HTTP server did not start")
        listening.listen(BACKLOG)  # uvicorn has set both, this and how many connections it accepts at once
        return serving


class EmbeddedService:
    """A service inside another program: in a thread with its own event loop, for the duration of a ``with`` block.
    ``url`` and ``key`` (the administrator's) are set once it runs. Entering raises the errors of a failed start, and an
    interruption ends the start. It is never a standby: a database that is in use is an error."""

    def __init__(self, settings: Settings, rules: ServiceRules | None = None) -> None:
        self.settings = settings
        self.url = self.key = ""
        self._service = Service(settings, rules=rules, may_wait=False)
        self._started: Future[None] = Future()

    def __enter__(self) -> Self:
        self._thread = LoopThread("service", self._serve, daemon=False, loop=TenantLoop)
        try:
            self._started.result()
        except BaseException:
            self._thread.stop()
            raise
        self.url, self.key = self._service.url, self._service.admin_key
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.stop()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the service's event loop, while the service runs."""
        return self._thread.call(coroutine)

    async def _serve(self, stopping: asyncio.Event) -> None:
        try:
            async with first_of(self._service.start(), stopping.wait()) as (starting, _):
                pass
            starting.result()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            async with first_of(stopping.wait(), self._service.serving()) as (_, serving):
                if serving.done():
                    log.error("the service stopped: %s", serving.exception())
        finally:
            await self._service.stop()


async def serve(settings: Settings) -> None:
    """Run a service until SIGINT, SIGTERM or SIGHUP and log to the terminal; a second signal ends the process at once.
    Raises the errors of :meth:`Service.start`."""
    interrupted = asyncio.Event()
    on_end_signals(interrupted.set, twice=True)

    async def run() -> None:
        async with Service(settings, [terminal_handler()]) as service:
            prefer_event_loop()
            to_stderr(*variable_notes(), *_greeting(service))
            await service.serving()

    await unless(interrupted.wait(), run())


def _greeting(service: Service) -> list[str]:
    """The features that work, the place of the files, and one command to continue with."""
    settings, url = service.settings, service.url
    data, models = settings.data, [name.strip() for name in settings.server.models.split(",") if name.strip()]
    tinker = f"; the Tinker SDK ({url}/tinker)" if find_spec("tinker") is not None else ""
    lines = [
        f"Rookery serves at {url} (Ctrl-C stops it, jobs resume at the next start)",
        f"works: jobs, chat, the OpenAI API ({url}/v1){tinker}; all routes: {url}/docs",
        f"the page: {url} (rookery open signs in on this machine; elsewhere with an API key)",
        f"data: {data}   admin key: {data / ADMIN_KEY_FILE}   logs: {data / 'logs'}",
    ]
    if models and settings.server.workers:
        where = "" if (url, data) == (Settings().base_url, Settings.load({}).data) else f" --url {url} --data {data}"
        lines.append(f"next, when a worker serves {models[0]}, in another terminal: rookery chat {models[0]}{where}")
    else:
        token = data / WORKER_TOKEN_FILE
        lines.append(f"next, to get a worker: ROOKERY_TOKEN=$(cat {token}) rookery worker --connect {url}")
    return lines


def _register_keys(database: Database, folder: DataFolder, id: str, now: float) -> None:
    """Registers the two keys in the data folder as keys of the administrator, whose tenant is created if there is
    none."""
    admin = next((row for row in database.read(tenants.list_tenants) if row.admin), None)
    if admin is None:
        admin = database.write(tenants.create_tenant, id, "admin", now, admin=True)
    known = {row.hash: row for row in database.read(tenants.keys, admin.id)}
    keys: list[tuple[KeyRole, str, str]] = [
        ("admin", folder.admin_key(), ADMIN_KEY_FILE),
        ("worker", folder.worker_token(), WORKER_TOKEN_FILE),
    ]
    for role, key, file in keys:
        row = known.get(hash_key(key))
        if row is None:
            database.write(tenants.add_key, hash_key(key), admin.id, file, now, role)
        elif row.revoked is not None:
            raise UserError(f"the key in {file} was revoked; delete the file, and the next start creates a new key")


def _check_database(settings: Settings) -> None:
    if settings.server.database:
        Database(settings.server.database).close()


def _check_scale(settings: Settings) -> None:
    least, most, fixed = settings.cluster.scale_min, settings.cluster.scale_max, settings.server.workers
    if most == 0 and least != ClusterSettings.model_fields["scale_min"].default:
        raise UserError(
            f"ROOKERY_SCALE_MIN is {least}, but the number of workers changes with ROOKERY_SCALE_MAX alone; set that"
            " too, or unset ROOKERY_SCALE_MIN"
        )
    if 0 < most < least:
        raise UserError(
            f"ROOKERY_SCALE_MAX is {most}, less than ROOKERY_SCALE_MIN, {least}; set it to 0 or at least {least}"
        )
    if 0 < most < fixed:
        raise UserError(
            f"ROOKERY_SCALE_MAX is {most}, but the {count_of(fixed, 'worker')} per model of ROOKERY_WORKERS always"
            f" stay; set it to 0 or at least {fixed}"
        )


def _check_sandbox(settings: Settings) -> None:
    if settings.server.sandbox == "gvisor":
        find_sandbox(settings.server.sandbox)


SETTING_CHECKS: tuple[Callable[[Settings], object], ...] = (
    check_sinks,
    _check_database,
    _check_scale,
    _check_sandbox,
    lambda settings: parse_judges(settings.server.judges),
    lambda settings: parse_sinks(settings.server.sinks),
    lambda settings: parse_verifiers(settings.server.verifiers),
    lambda settings: parse_games(settings.server.games),
)
"""Each raises :class:`UserError` for settings that a service cannot start with, as :func:`plan_of` does."""


def plan_of(settings: Settings) -> Plan | None:
    """The plan that the settings name, if they name one. Raises :class:`UserError` where it cannot be followed."""
    return plan_to_follow(Path(settings.server.plan)) if settings.server.plan else None


def check_settings(settings: Settings) -> Plan | None:
    """The plan of the settings, if there is one. Raises :class:`UserError` where a service cannot start with them."""
    for refuse in SETTING_CHECKS:
        refuse(settings)
    return plan_of(settings)


def _check_place(database: Database, place: Place, folder: DataFolder, rules: StoreRules) -> None:
    """Raises :class:`UserError` where the artifacts are not those of the database, :class:`Unavailable` where either
    does not answer now. It comes before the claim: a service with a wrong data folder must not take the database from
    the right one, however often it starts."""
    try:
        artifacts_at(place, folder.artifacts, rules).inspect(database.owner())
    except Unavailable as error:
        kind: type[RookeryError] = UserError if database.stays_away(error) else Unavailable
        raise kind(f"the service cannot start: {error}{error.detail and f' ({error.detail})'}") from None
    except OSError as error:
        raise unusable(error)(
            f"the artifacts cannot be read: {error}; set ROOKERY_ARTIFACTS_URL to a place that can"
        ) from None


async def _hold(artifacts: Artifacts, lease: Lease) -> None:
    """Make this service the holder of the place. Raises :class:`UserError` where another one is that."""
    waits = False
    while not await asyncio.to_thread(artifacts.hold, lease):
        if not waits:
            waits = True
            log.warning("waits for %.0f s: another service used the artifacts, and may be alive", HOLD_SECONDS)
        await asyncio.sleep(WATCH_SECONDS)


async def renew_hold(artifacts: Artifacts, lease: Lease, seconds: float) -> None:
    """Renew the lease on the place each ``seconds``. While another service has it nothing is written or deleted there,
    and jobs wait."""
    holds = True
    while True:
        await asyncio.sleep(seconds)
        try:
            with shortages():
                again = await in_new_thread(artifacts.hold, lease)
        except PlaceInUse as error:
            if holds:
                log.error("%s", error)
            holds = False
        except (RookeryError, OSError):  # its callers report it
            continue
        else:
            if again and not holds:
                log.warning("this service holds the artifacts again")
            holds = again or holds


def _tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """The service's certificate, followed where its files change; None without one. Raises :class:`UserError`."""
    certificate, key = settings.tls_cert, settings.tls_key
    if not certificate:
        return None
    usual = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files = (certificate, key) if key else (certificate,)
    try:
        return FollowingContext(usual, files, lambda context: context.load_cert_chain(certificate, key or None))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"the certificate {certificate} cannot be used with its key ({reason})") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        dual = host == "::" and socket.has_dualstack_ipv6()
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        # Inherited by connections. Else the body of a response waits for the acknowledgement of its headers, 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except (socket.gaierror, UnicodeError) as error:  # the latter for a name with an empty part, or one too long
        reason = error.strerror if isinstance(error, OSError) else "no name of a machine"
        raise UserError(f"cannot listen on address {short(host)} ({reason}); give another one with --host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use; stop the process that listens there, or give another one with --port"
            ) from None
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror}); give another --host or --port") from None
