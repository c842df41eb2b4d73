"""The service as one thing that starts and stops: data folder, database, controller, HTTP, and the local processes.

* It starts whole or not at all: whatever had started ends again, and the reason is one line.
* It stops in the reverse order and leaves nothing running; jobs stay as they are and go on at the next start. However
  this process ends, the processes that it started end with it.
* Two services can live in one program: nothing is global but logging, which is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import uvicorn

from rookery import protocol
from rookery.aio import RandomIds, SystemClock
from rookery.controller.controller import Controller
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.environments.builtins import find
from rookery.errors import Unavailable, UserError
from rookery.server.app import build
from rookery.server.auth import ServiceContext
from rookery.server.local_cluster import LocalCluster
from rookery.server.models import Models
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.data_dir import ADMIN_KEY_FILE, WORKER_TOKEN_FILE, DataFolder, hash_key
from rookery.storage.database import Database
from rookery.storage.store import Store
from rookery.storage.writer import StorageWriter
from rookery.telemetry import sinks
from rookery.telemetry.log import file_handler, logging_to, terminal_handler
from rookery.telemetry.prometheus import Prometheus
from rookery.tokenization.registry import resolve

log = logging.getLogger("rookery.server")

KEEP_ALIVE_SECONDS = 75
"""An idle connection is kept this long: longer than clients keep theirs, so that it is they who close."""


CLAIM_SECONDS = 5.0
"""How often a service makes sure that its database is still its own."""


class _Server(uvicorn.Server):
    """uvicorn as a part of this process: it leaves signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class Service:
    """A Rookery service on ``settings``. ``url`` and ``admin_key`` are known once it has started."""

    def __init__(self, settings: Settings, handlers: list[logging.Handler] | None = None) -> None:
        """``handlers`` get the log's lines too, beside the file in the data folder."""
        self.settings = settings
        self.url = ""
        self.admin_key = ""
        self._handlers = handlers or []
        self._stack = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def start(self) -> None:
        """Raises :class:`UserError` for what a person can mend: the port, the data folder, the settings."""
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
        """Returns only when serving ends by itself, which is an error; raises it. So does losing the database."""
        assert self._serving is not None and self._holding is not None
        tasks = (self._serving, self._holding)
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
        sinks.check(self.settings)
        models = [resolve(name.strip()).name for name in self.settings.server.models.split(",") if name.strip()]
        settings = self.settings.replace(models=",".join(models))
        opened = self._stack
        folder = opened.enter_context(DataFolder(settings.data))
        handlers = [*self._handlers, file_handler(folder.logs / "service.jsonl")]
        opened.enter_context(logging_to(handlers, settings.server.log_level))
        listening = opened.enter_context(_listen(settings.server.host, settings.server.port))
        self.url = f"http://{_reachable(settings.server.host)}:{listening.getsockname()[1]}"
        token = folder.worker_token()

        database = Database(settings.server.database or folder.database_url)
        opened.callback(database.close)
        await asyncio.to_thread(database.create)
        await asyncio.to_thread(database.claim)
        clock, ids, writer = SystemClock(), RandomIds(), StorageWriter()
        opened.callback(writer.close)
        self.admin_key = folder.admin_key()
        await asyncio.to_thread(_admit, database, self.admin_key, ids.new("tenant"), clock.time())
        artifacts = Artifacts(folder.artifacts)
        prepared = Models(settings)
        opened.push_async_callback(prepared.close)

        async def authenticate(given: str) -> str | None:
            if hmac.compare_digest(given.encode(), token.encode()):
                return SERVICE
            owner = await asyncio.to_thread(database.tenant_of_key, hash_key(given))
            return None if owner is None else owner.id

        local = LocalCluster(settings, self.url, token)
        controller = Controller(
            Store(database, writer),
            artifacts,
            settings,
            clock=clock,
            ids=ids,
            chat=prepared.chat,
            check_environment=lambda id, options: find(id).vet(options),
            provide=local.provide,
            authenticate=authenticate,
            worker_token=token,
            jobs_folder=folder.jobs,
        )
        opened.push_async_callback(controller.stop)
        await controller.start()

        parts = ServiceContext(
            controller=controller,
            database=database,
            artifacts=artifacts,
            settings=settings,
            clock=clock,
            ids=ids,
            prometheus=Prometheus(),
            closing=self._closing,
        )
        await self._serve(build(parts), listening)
        self._holding = asyncio.create_task(self._hold(database), name="claim")
        opened.push_async_callback(_ended, self._holding)
        opened.push_async_callback(local.stop)  # first of all, so that workers can send what they have
        await local.start()

    @staticmethod
    async def _hold(database: Database) -> None:
        """Make sure, for ever, that the database is this service's alone. Raises :class:`UserError` when another one
        has taken it while it could not be reached from here."""
        while True:
            await asyncio.sleep(CLAIM_SECONDS)
            with contextlib.suppress(Unavailable):  # whoever needs it says so
                await asyncio.to_thread(database.claim)

    async def _serve(self, app: Any, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="httptools",
            ws_max_size=protocol.MAX_FRAME,
            ws_per_message_deflate=False,  # frames are small and frequent
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(self.settings.server.stop_seconds)),
        )
        server = _Server(config)
        self._serving = serving = asyncio.create_task(server.serve([listening]), name="http")

        async def end() -> None:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)

        self._stack.push_async_callback(end)
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            serving.result()
            raise RuntimeError("the HTTP server did not start")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def serve(settings: Settings) -> None:
    """Run a service until SIGINT or SIGTERM, telling the terminal. Raises what :meth:`Service.start` raises."""
    own = asyncio.current_task()
    assert own is not None
    loop = asyncio.get_running_loop()
    told = False

    def end() -> None:
        nonlocal told
        told = True
        own.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    try:
        async with Service(settings, [terminal_handler()]) as service:
            for line in _greeting(service):
                print(line, file=sys.stderr, flush=True)
            await service.serving()
    except asyncio.CancelledError:
        if not told:
            raise
        own.uncancel()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _greeting(service: Service) -> list[str]:
    data = service.settings.data
    return [
        f"Rookery serves at {service.url} (API: {service.url}/docs); Ctrl-C ends it, jobs go on at the next start",
        f"data: {data}   admin key: {data / ADMIN_KEY_FILE}   logs: {data / 'logs'}",
        f"more workers: rookery worker --connect {service.url} --token $(cat {data / WORKER_TOKEN_FILE})",
    ]


def _admit(database: Database, key: str, id: str, now: float) -> None:
    """Makes the administrator's key of the data folder a key of the administrator, who is made if there is none."""
    if database.tenant_of_key(hash_key(key)) is None:
        known = next((row for row in database.list_tenants() if row.admin), None)
        if known is not None and any(row.hash == hash_key(key) for row in database.keys(known.id)):
            raise UserError(
                f"the key in {ADMIN_KEY_FILE} was revoked; remove the file, and the next start makes another"
            )
        admin = known if known is not None else database.create_tenant(id, "admin", now, admin=True)
        database.add_key(hash_key(key), admin.id, "admin.key", now)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. Else a reply's body waits for the acknowledgement of its head: 40 ms for every reply.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except socket.gaierror as error:
        raise UserError(f"address {host} cannot be listened on ({error.strerror}); give another with --host") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is taken; stop what listens there, or give another one with --port"
            ) from None
        raise UserError(
            f"{host}:{port} cannot be listened on ({error.strerror}); give another --host or --port"
        ) from None


def _reachable(host: str) -> str:
    """An address of this machine under which the one that is listened on can be reached."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
