"""One engine, two kinds of transaction, the same on SQLite and PostgreSQL.

* ``writing`` commits as a whole or not at all. On SQLite it takes the write lock at its start, so that it never fails
  half-way for another writer; the commit returns after the log is on disk (``synchronous=FULL``), since what is
  published after it must survive a power cut.
* ``reading`` sees one snapshot for all its queries and never waits for a writer.
* Within ``batch_transaction`` the calls of one thread share a transaction: one wait for the disk for all of them.
* A full disk is :class:`~rookery.errors.StorageFull`; a database that answers and is read-only, as a replica,
  is :class:`~rookery.errors.DatabaseReadOnly`; a server that answers and refuses this user or this database is
  :class:`~rookery.errors.DatabaseRefuses`. A row that the tables or their indexes refuse is the caller's error.
  Every other failure (a lost server, a denied permission, a database that is another one than at the start) is
  :class:`~rookery.errors.DatabaseAway`. They leave the database as it was, except that a connection lost during the
  commit itself leaves its outcome to be read back.
* A PostgreSQL database that one service has claimed refuses every other service until that connection ends: with its
  process, with its machine, or where the process stands still. Each claim is a new epoch, which every writing
  transaction checks: a service that lost its claim changes nothing. A pooler whose clients share sessions, as in its
  transaction mode, is refused: a claim there is everybody's. The claim of a SQLite database is a lock of the
  kernel on the file ``<database>.lock``: it ends with the process.
* A SQLite file that is deleted, moved or replaced while it is open is noticed at the next transaction: what is written
  to the old one would be lost with the process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, create_engine, event, func, insert, inspect, select, text, update
from sqlalchemy.engine import Engine, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.pool import StaticPool

from rookery.errors import (
    NO_ROOM,
    DatabaseAway,
    DatabaseReadOnly,
    DatabaseRefuses,
    RookeryError,
    StorageFull,
    Unavailable,
    UserError,
    installs,
    shortage,
    shortages,
)
from rookery.folders import probe_writes
from rookery.storage import migrations
from rookery.storage.models import MetaRow
from rookery.storage.place import Owner
from rookery.storage.repositories.versions import live_hashes

log = logging.getLogger("rookery.storage.db")

P = ParamSpec("P")
T = TypeVar("T")

LOCK_WAIT_SECONDS = 30.0
"""Timeout of a SQLite writer that waits for another one: far longer than any transaction here."""

CLAIM_IDLE_SECONDS, CLAIM_PROBE_SECONDS, CLAIM_PROBES = 15, 5, 3
"""TCP keepalive of the connections: half a minute after a service's machine has vanished, another one gets the
database."""

CLAIM_SILENT_SECONDS = 30
"""A claim that its process has not renewed for so long ends, in PostgreSQL 14 or later. So does a transaction in which
nothing happened: the next epoch waits for it."""

LOCK_SECONDS, READ_LOCK_SECONDS = 2 * CLAIM_SILENT_SECONDS, 5
"""How long a statement waits for a lock in PostgreSQL, such as that of an administrator's session: one of a transaction
that may change rows, and any other one, such as that of a new connection. The next epoch waits longer: for the
transactions of the one before."""

CLAIM_WAIT_SECONDS = 2
"""How long a new service waits for the claim of one that has just ended."""

CONNECT_SECONDS = 5
"""How long a new connection to PostgreSQL may take: its server is asked again soon."""

_CLAIM = int.from_bytes(b"rookery\0", "big")
"""The number of the advisory lock that a service holds: one that no other program is likely to use."""

CALLERS_ERRORS = (IntegrityError, DataError)
"""Errors about the rows of the caller."""

_LOCKED = text(
    "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    f" AND classid = {_CLAIM >> 32} AND objid = {_CLAIM & 0xFFFFFFFF} AND objsubid = 1"
)
"""Whether the session that answers holds the claim's lock."""

POOLER_LOOKS = 3
"""Looks at the sessions behind a pooler: with several, each may answer a look by chance as a session of one's own."""

_EPOCH = select(MetaRow.value).where(MetaRow.name == "epoch")

_SQLITE_DISK_ERRORS = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""Errors in which SQLite does not say which one of the system it met: its disk is asked. Of the kinds of a full disk it
knows one, and only where it writes, not where it makes its shared memory larger."""

_DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)
"""Error numbers of a disk or a folder that takes no writes."""

_POSTGRES_DISK_FULL = "53100"
_POSTGRES_READ_ONLY = "25006"
_POSTGRES_LOCK_TIMEOUT = "55P03"
_POSTGRES_LIMIT_EXCEEDED = "54"
"""The class of the errors about one statement that exceeds a limit of the server, such as a value that no index
takes."""

_POSTGRES_REFUSALS = ("28", "3D", "3F", "42501")
"""Beginnings of the codes of a server that answers and refuses: authorization, the names of the database and of its
schema, permissions."""

_REFUSED_CONNECTION = re.compile(
    r"authentication failed|no password supplied|(?:role|database|user) \S+ does not exist|no such (?:database|user)"
    r"|pg_hba\.conf|not permitted to log in|permission denied for database|does not support SSL"
    r"|certificate verify failed|certificate file \S+ does not exist|invalid \S+ value"
)
"""Parts of the errors of a connection that no later try makes, of PostgreSQL and its poolers: they carry no code. A
server that writes another language counts as away."""

DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
"""By the beginning of an address, before any ``+``: a platform's variable may name another program's driver."""

ADDRESSES = "sqlite:////path/rookery.db or postgresql://user@host/name"


class DatabaseInUse(UserError):
    """Another service has claimed the database."""


class Database:
    """SQLite or PostgreSQL, by URL. Call :meth:`create` before anything else and :meth:`close` at the end. Methods
    block, keep no state between calls, and may be called from any thread.

    :meth:`write` and :meth:`read` run the functions of :mod:`rookery.storage.repositories`, each in one transaction:

    * A function that answers a tenant's request takes ``tenant`` first and sees only that tenant's rows: rows of
      another raise :class:`~rookery.errors.NotFound`, or leave the list empty, as if they did not exist.
    * A function without it is for the controller, with ids that it got from such a request or from
      ``all_unfinished_jobs``.
    """

    def __init__(
        self, url: str, *, claim_wait: float = CLAIM_WAIT_SECONDS, claim_silent: float = CLAIM_SILENT_SECONDS
    ) -> None:
        """``url``: a SQLAlchemy URL. ``sqlite://`` alone lives in memory and serves one thread at a time.
        ``claim_wait``, ``claim_silent``: seconds in place of the constants, whole milliseconds.

        Raises :class:`UserError` for one that names no usable database.
        """
        self._claim_wait, self._claim_silent = (f"{1000 * seconds:.0f}ms" for seconds in (claim_wait, claim_silent))
        self._shared = threading.local()
        self._next, self._writing = threading.Lock(), threading.Lock()
        """Of SQLite's writers in this process, one holds the second lock and the next one holds the first."""
        self._claimed: Connection | None = None
        self._lock: int | None = None
        """The descriptor of the lock file that is the claim of a SQLite database."""
        self._service = ""
        """The id of the service that opened it; empty for a command."""
        self._waited = False
        """Another service had the claim when this one asked for it."""
        self.ended = ""
        """The id of the service that had the claim before, where this one waited for its end; else empty."""
        self._inode: tuple[int, int] | None = None
        """Device and inode of the SQLite file that :meth:`create` opened: another file under its name is refused."""
        self._epoch: str | None = None
        """The epoch of the last claim; None without one."""
        self._closed = False
        """:meth:`close` gave up the claim: no memory of the database is left."""
        self._identity: str | None = None
        """The identity of the database that :meth:`create` opened: a new connection to another one is refused."""
        self._away = False
        """The last use of it failed, which the log has reported."""
        self._refuses_writes = False
        """It takes no writes, which the log has reported."""
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError):
            raise UserError(f"database: the address cannot be read; give one like {ADDRESSES}") from None
        if "@" in (parsed.host or ""):  # the rest of the password, which would be shown as a host
            raise UserError("database: the address has more than one @; write that of a user or password as %40")
        kind = parsed.get_backend_name()
        if kind not in DRIVERS:
            raise UserError(f"database: {kind} is not supported; give an address like {ADDRESSES}")
        parsed = parsed.set(drivername=DRIVERS[kind])
        patience = {name: value for name, value in _PATIENCE.items() if name not in parsed.query}
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": patience}
        if kind == "sqlite":
            options = {"connect_args": {"check_same_thread": False, "timeout": LOCK_WAIT_SECONDS}}
        if kind == "sqlite" and parsed.database in (None, "", ":memory:"):
            options["poolclass"] = StaticPool
        else:  # of the library's fifteen each may hang, with its thread, while the server stands still
            options["max_overflow"] = -1
        try:
            self.engine: Engine = create_engine(parsed, **options)
        except ModuleNotFoundError as error:
            raise UserError(f"database: {error.name} is missing; {installs('postgres')}") from None
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "do_connect", self._check_file)
            event.listen(self.engine, "checkout", self._check_file)
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
            self._reader = self.engine.execution_options(begin="BEGIN")
        else:
            event.listen(self.engine, "connect", _prepare_postgresql)
            self._reader = self.engine.execution_options(isolation_level="REPEATABLE READ")
        event.listen(self.engine, "connect", self._check_identity)

    def stays_away(self, error: RookeryError) -> bool:
        """Whether ``error`` is about the database and no later start can succeed, unless its operator changes
        something. A server may be away for a while; a file that cannot be used stays so."""
        file = self.engine.dialect.name == "sqlite"
        return isinstance(error, DatabaseRefuses) or (file and isinstance(error, DatabaseAway))

    def create(self) -> None:
        """Make the tables, or migrate those of an earlier version of Rookery. The schema's version is read before
        anything is changed. Raises :class:`UserError` if the database cannot be opened, or was written by a version of
        Rookery that is newer or too old; then nothing was changed; :class:`Unavailable` for one whose server is away or
        takes no writes now."""
        try:
            self._make_private()
            with self.writing() as connection:
                problem = migrations.upgrade(connection)
                if not problem and self._claimed is not None and self._epoch is None:
                    self._epoch = _next_epoch(connection)
                identity = None if problem else _identity(connection)
        except (DBAPIError, Unavailable, OSError) as error:
            lasting = not isinstance(error, Unavailable) or self.stays_away(error)
            kind: type[RookeryError] = UserError if lasting else Unavailable
            raise kind(f"database {self._shown_url()} cannot be opened: {_reason(error)}") from None
        if problem:
            raise UserError(f"database {self._shown_url()} {problem}")
        self._identity = identity
        self._inode = self._file_inode()

    def owner(self) -> Owner:
        """This database's record of the place of its artifacts. It may be called before :meth:`claim` and
        :meth:`create`: it changes nothing. Raises :class:`Unavailable`."""
        url, shown = self.engine.url, self._shown_url()
        if self.engine.dialect.name == "sqlite" and _file(url) and not os.path.exists(_file(url)):
            return Owner(shown)
        with self.reading() as connection:
            if migrations.revision(connection) is None or not inspect(connection).has_table(MetaRow.__tablename__):
                return Owner(shown)
            meta = {row.name: row.value for row in connection.execute(select(MetaRow.name, MetaRow.value))}
            current = migrations.revision(connection) == migrations.HEAD
            named = frozenset(live_hashes(connection)) if current else None
        return Owner(shown, meta.get("identity"), meta.get("artifacts", ""), named)

    def used_place(self, where: str, service: str) -> None:
        """The artifacts of this database lie at ``where``, and the service with the id ``service`` holds that place."""
        self._service = service
        with self.writing() as connection:
            _set_meta(connection, "artifacts", where)
            _set_meta(connection, "service", f"{self._epoch or ''} {service}")

    @property
    def locks(self) -> list[int]:
        """Descriptors of files that are locked while this service has the claim."""
        return [] if self._lock is None else [self._lock]

    def ping(self) -> None:
        """Ask the database for a sign of life. Raises :class:`Unavailable`."""
        with self.reading() as connection:
            self._check_epoch(connection.execute(_EPOCH).scalar())

    def check_writes(self) -> None:
        """Change a row to what it is. Raises :class:`StorageFull`, :class:`Unavailable`."""
        with self.writing() as connection:
            connection.execute(update(MetaRow).where(MetaRow.name == "identity").values(value=MetaRow.value))
        if self._refuses_writes:
            self._refuses_writes = False
            log.warning("the database takes writes again")

    def claim(self) -> None:
        """Reserve the database for this service until :meth:`close`; further calls renew the claim. It may be called
        before :meth:`create`. Raises :class:`DatabaseInUse` where another service has it and does not end within
        :data:`CLAIM_WAIT_SECONDS` (on SQLite at once), or had it since; :class:`UserError` behind a pooler whose
        clients share sessions, :class:`Unavailable`."""
        if self.engine.dialect.name == "sqlite":
            self._claim_file()
            return
        with self._plain_errors():
            try:
                if self._claimed is not None:
                    if self._holds_claim(self._claimed):
                        return
                    self._give_up_claim()  # its address may lead to another server by now, where anybody can claim
            except DBAPIError as error:
                if _code(error) == _POSTGRES_LOCK_TIMEOUT:  # the claim is held: somebody locks the epoch's table
                    raise
                self._give_up_claim()  # the claim ended with the connection
            connection = self.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            free = False
            try:
                self._refuse_shared_sessions(connection)
                connection.execute(select(func.set_config("lock_timeout", self._claim_wait, False)))
                connection.execute(select(func.pg_advisory_lock(_CLAIM)))
                if (self.engine.dialect.server_version_info or (0,)) >= (14,):
                    connection.execute(select(func.set_config("idle_session_timeout", self._claim_silent, False)))
                if inspect(connection).has_table(MetaRow.__tablename__):
                    self._begin_epoch()
                free = True
            except OperationalError as error:
                if _code(error) != _POSTGRES_LOCK_TIMEOUT:
                    raise
            finally:
                if not free:
                    connection.invalidate()  # it may have the lock already
                    connection.close()
        if free:
            self._claimed = connection
            self._waited = self._closed = False
            return
        self._waited = True
        raise self._in_use()

    def _holds_claim(self, claimed: Connection) -> bool:
        """Whether the claim is still one. Raises :class:`DatabaseInUse` where another service had one since."""
        if claimed.execute(select(func.current_setting("transaction_read_only"))).scalar() != "off":
            return False
        if not claimed.execute(_LOCKED).scalar():
            return False
        if self._epoch is not None and int(found := claimed.execute(_EPOCH).scalar() or 0) > int(self._epoch):
            raise self._had_another(found)
        return True

    def _refuse_shared_sessions(self, connection: Connection) -> None:
        """Raises :class:`UserError` where sessions of the server are not those of its clients. The number by which a
        client may cancel its statements tells whether a pooler is between them."""
        first = _session(connection)
        driver: Any = connection.connection.driver_connection
        if driver.info.backend_pid == first:
            return
        for _ in range(POOLER_LOOKS):
            with self.engine.connect() as other:  # in a transaction: it has its session until the end
                shared = _session(other) == first or _session(connection) != first
            if shared:
                raise UserError(
                    f"database {self._shown_url()}: a pooler in transaction mode answers there, whose clients share"
                    " sessions: two services could use the database at once; give its direct address, or one of a"
                    " pooler in session mode"
                )

    def _had_another(self, epoch: object) -> DatabaseInUse:
        return DatabaseInUse(
            f"database {self._shown_url()} had another service since (epoch {epoch}, not {self._epoch}); start this one"
            " again"
        )

    def _begin_epoch(self) -> None:
        """The claim is new. Raises :class:`DatabaseInUse` where another service had one since this one's last: this one
        remembers what was true before."""
        last = self._epoch
        try:
            with self.engine.begin() as connection:
                connection.execute(select(func.set_config("lock_timeout", "0", True)))  # however long they take
                found = int(connection.execute(_EPOCH.with_for_update()).scalar() or 0)
                known = last is None or self._closed or found <= int(last)
                own = bool(self._service) and _last_service(connection) == self._service  # its commit had no answer
                if not (known or own):
                    raise self._had_another(found)
                self.ended = _last_service(connection) if self._waited else ""
                self._epoch = _next_epoch(connection)
                if self._service:
                    _set_meta(connection, "service", f"{self._epoch} {self._service}")
        except BaseException:
            self._epoch = last
            raise

    def _claim_file(self) -> None:
        path = _file(self.engine.url)
        if self._lock is not None or not path:
            return
        name = f"{os.path.realpath(path)}.lock"
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(lock)
                raise
        except BlockingIOError:
            raise self._in_use() from None
        except OSError as error:
            if (full := shortage(error, "the disk of the database")) is not None:
                raise full from None
            raise UserError(
                f"database {self._shown_url()}: {name} cannot be locked ({error.strerror}): two services could use it"
                " at once; set ROOKERY_DATABASE to a file on a disk of this machine that can be written"
            ) from None
        self._lock = lock

    def _in_use(self) -> DatabaseInUse:
        return DatabaseInUse(
            f"database {self._shown_url()} is in use by another service; stop that one, set ROOKERY_DATABASE to a"
            " database of this one's own, or give both the same ROOKERY_ARTIFACTS_URL: then this one waits as standby"
        )

    def _give_up_claim(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._claimed is not None:
            self._claimed.invalidate()  # ends the connection, and with it the lock, instead of returning it to the pool
            self._claimed.close()
            self._claimed = None

    def close(self) -> None:
        self._give_up_claim()
        self._closed = True
        self.engine.dispose()

    @contextmanager
    def batch_transaction(self) -> Iterator[None]:
        """Calls of this thread within become durable at the end, all at once. A call that raises is undone alone. A
        full disk or a lost server, in a call or at the end, is raised at the end, and all calls are undone."""
        shared = self._shared
        with self._begin() as connection:
            shared.connection, shared.failure = connection, None
            try:
                yield
            finally:
                shared.connection = None
            if shared.failure is not None:
                raise shared.failure

    def _make_private(self) -> None:
        """Make SQLite's file readable by its owner only: it holds every tenant's text. SQLite gives its companions the
        same mode."""
        path = _file(self.engine.url)
        if self.engine.dialect.name == "sqlite" and path:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.chmod(path, 0o600)

    def _shown_url(self) -> str:
        """The URL without the parts that may hold a password."""
        shown = self.engine.url.set(drivername=self.engine.url.get_backend_name(), query={})
        return shown.render_as_string(hide_password=True)

    def _shared_connection(self) -> Connection | None:
        """This thread's connection within ``batch_transaction``. Raises the error with which that failed already."""
        shared: Connection | None = getattr(self._shared, "connection", None)
        if shared is not None and self._shared.failure is not None:
            raise self._shared.failure
        return shared

    def write(self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run ``function(connection, …)`` in a transaction that may change rows."""
        with self.writing() as connection:
            return function(connection, *arguments, **named)

    def read(self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run ``function(connection, …)``, which only reads."""
        with self.reading() as connection:
            return function(connection, *arguments, **named)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        shared = self._shared_connection()
        if shared is not None:
            with self._failing_the_batch():
                part = shared.begin_nested()
                try:
                    yield shared
                    part.commit()
                except (StorageFull, Unavailable):
                    raise
                except DBAPIError as error:
                    if _of_caller(error):  # else the database may have rolled everything back
                        part.rollback()
                    raise
                except BaseException:
                    part.rollback()
                    raise
            return
        with self._begin() as connection:
            yield connection

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        """A writing transaction. Raises :class:`Unavailable` where another service has claimed the database since."""
        with self._turn(), self._plain_errors(), self.engine.begin() as connection:
            if self.engine.dialect.name == "postgresql":
                connection.execute(select(func.set_config("lock_timeout", f"{LOCK_SECONDS}s", True)))
            if self._epoch is not None:
                self._check_epoch(connection.execute(_EPOCH.with_for_update(read=True)).scalar())
            yield connection

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Within, no other thread of this process writes to a SQLite database; the threads take turns. SQLite lets a
        thread that waits ask again and again: while another one is busy it would not get through."""
        if self.engine.dialect.name != "sqlite":
            yield
            return
        with self._next:
            self._writing.acquire()
        try:
            yield
        finally:
            self._writing.release()

    def _check_epoch(self, epoch: str | None) -> None:
        if self._epoch is not None and epoch != self._epoch:
            raise Unavailable(f"the database has another service since (epoch {epoch}, not {self._epoch})")

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        shared = self._shared_connection()
        if shared is not None:
            with self._failing_the_batch():
                yield shared
            return
        with self._plain_errors(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def _failing_the_batch(self) -> Iterator[None]:
        """A call within ``batch_transaction``: after a full disk or a lost server all calls fail with that."""
        try:
            with self._plain_errors():
                yield
        except (StorageFull, Unavailable) as error:
            self._shared.failure = error
            raise

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        """Raises the meaning of a failure. The operator's log has its reason, once until the database answers again."""
        try:
            with shortages():
                yield
        except DBAPIError as error:
            if _of_caller(error):
                raise
            if isinstance(error.orig, sqlite3.Error):
                # The other bits say where it happened.
                code: int | str | None = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
            else:
                code = _code(error)
            refused = self._disk_error() if code in _SQLITE_DISK_ERRORS else 0
            if code in (sqlite3.SQLITE_FULL, _POSTGRES_DISK_FULL) or refused in NO_ROOM:
                raise StorageFull("the database's disk is full; free some space, nothing was half-written") from error
            if code in (sqlite3.SQLITE_READONLY, _POSTGRES_READ_ONLY) or refused in _DENIED:
                raise self._read_only(os.strerror(refused) if refused else _reason(error)) from error
            raise self._not_there(_reason(error), _refused(error)) from error
        else:
            if self._away:
                self._away = False
                log.warning("the database answers again")

    def _disk_error(self) -> int:
        """The error number with which the disk of the SQLite file takes no bytes now; 0 where it takes them."""
        path = _file(self.engine.url)
        try:
            if path:
                probe_writes(Path(path).parent)
        except OSError as error:
            return error.errno or 0
        return 0

    def _not_there(self, reason: str, refused: bool = False) -> DatabaseAway:
        problem = "refuses access" if refused else "does not answer"
        if not self._away:
            self._away = True
            log.error("the database %s %s: %s", self._shown_url(), problem, reason)
        return (DatabaseRefuses if refused else DatabaseAway)(f"the database {problem}", reason)

    def _read_only(self, reason: str) -> DatabaseReadOnly:
        if not self._refuses_writes:
            self._refuses_writes = True
            log.error("the database %s takes no writes: %s", self._shown_url(), reason)
        if self.engine.dialect.name == "postgresql":
            self.engine.dispose()  # its address may lead to another server by now
        return DatabaseReadOnly("the database takes no writes: it is read-only now", reason)

    def _file_inode(self) -> tuple[int, int] | None:
        """The inode of the SQLite file that has the name now; None for a database in memory or on a server."""
        path = _file(self.engine.url)
        if self.engine.dialect.name != "sqlite" or not path:
            return None
        try:
            found = os.stat(path)
        except OSError as error:
            raise self._not_there(f"{path} is not there ({error.strerror})") from error
        return found.st_dev, found.st_ino

    def _check_file(self, *_: object) -> None:
        """Check the file before a new connection, which would make a new database where the file is away, and before
        the next use of an old one, which may be to a file without a name."""
        if self._inode is not None and self._file_inode() != self._inode:
            raise self._not_there(
                "another file has its name; put the one of the start back, or start the service again"
            )

    def _check_identity(self, connection: Any, record: object) -> None:
        if self._identity is None:
            return
        cursor = connection.cursor()
        try:
            cursor.execute(f"SELECT value FROM {MetaRow.__tablename__} WHERE name = 'identity'")
            found = cursor.fetchone()
        except Exception as error:  # no such table, no permission: whatever the driver calls it
            raise self._not_there(_reason(error)) from error
        finally:
            cursor.close()
        if connection.__class__.__module__.startswith("psycopg"):
            connection.rollback()
        if found is None or found[0] != self._identity:
            raise self._not_there("another database answers at its address")


def _session(connection: Connection) -> int:
    """The server's process that runs this statement of a connection to PostgreSQL."""
    return int(connection.execute(select(func.pg_backend_pid())).scalar_one())


def _code(error: DBAPIError) -> str | None:
    """PostgreSQL's code of the error; None for an error that carries none."""
    return getattr(error.orig, "sqlstate", None)


def _of_caller(error: DBAPIError) -> bool:
    """Whether the database refused the caller's rows or statement. All other errors are about the database."""
    limit = str(_code(error)).startswith(_POSTGRES_LIMIT_EXCEEDED)
    return limit or isinstance(error, CALLERS_ERRORS)


def _refused(error: DBAPIError) -> bool:
    """Whether a server of PostgreSQL answered, and refuses this user or this database; or the driver refuses the
    address."""
    if isinstance(error.orig, sqlite3.Error):
        return False
    if (code := _code(error)) is not None:
        return code.startswith(_POSTGRES_REFUSALS)
    return isinstance(error, ProgrammingError) or _REFUSED_CONNECTION.search(str(error.orig)) is not None


def _reason(error: Exception) -> str:
    """The first line of an error of the driver."""
    detail = getattr(error, "detail", "") or str(getattr(error, "orig", error))
    return (detail.strip() or type(error).__name__).splitlines()[0]


def _file(url: URL) -> str:
    """The file of a SQLite database; empty for one in memory, and for a URI of SQLite, whose options may change what
    its file is."""
    path = url.database
    return path if path and path != ":memory:" and not path.startswith("file:") else ""


def _prepare_sqlite(connection: sqlite3.Connection, record: object) -> None:
    connection.isolation_level = None  # transactions begin in _begin_sqlite, not where the driver guesses
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


_PATIENCE: Mapping[str, int] = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": CLAIM_IDLE_SECONDS,
    "keepalives_interval": CLAIM_PROBE_SECONDS,
    "keepalives_count": CLAIM_PROBES,
    "tcp_user_timeout": CLAIM_SILENT_SECONDS * 1000,
}
"""Options of a connection to PostgreSQL at this end, where the address has no others: without them a server that has
vanished, as at a failover, is waited for a quarter of an hour. The last is for what was sent and not acknowledged,
during which the system sends no keepalives."""


def _prepare_postgresql(connection: Any, record: object) -> None:
    values = {
        "tcp_keepalives_idle": f"{CLAIM_IDLE_SECONDS}s",
        "tcp_keepalives_interval": f"{CLAIM_PROBE_SECONDS}s",
        "tcp_keepalives_count": str(CLAIM_PROBES),
        "idle_in_transaction_session_timeout": f"{CLAIM_SILENT_SECONDS}s",
        "lock_timeout": f"{READ_LOCK_SECONDS}s",
    }
    with connection.cursor() as cursor:
        for name, value in values.items():
            cursor.execute("SELECT set_config(%s, %s, false)", (name, value))
    connection.commit()


def _identity(connection: Connection) -> str:
    """A random name of this database, made at the first call of all. Its backups keep it."""
    found = connection.execute(select(MetaRow.value).where(MetaRow.name == "identity")).scalar()
    if found is None:
        found = secrets.token_hex(16)
        connection.execute(insert(MetaRow).values(name="identity", value=found))
    return found


def _set_meta(connection: Connection, name: str, value: str) -> None:
    if not connection.execute(update(MetaRow).where(MetaRow.name == name).values(value=value)).rowcount:
        connection.execute(insert(MetaRow).values(name=name, value=value))


def _next_epoch(connection: Connection) -> str:
    """The epoch of a new claim. Returns once transactions of earlier ones have ended."""
    found = connection.execute(_EPOCH.with_for_update()).scalar()
    epoch = str(int(found or 0) + 1)
    _set_meta(connection, "epoch", epoch)
    return epoch


def _last_service(connection: Connection) -> str:
    """The id of the service that had the claim until now; empty where another one had it since, without the place of
    the artifacts: as on a copy of the database of a service that is alive."""
    found = connection.execute(select(MetaRow.value).where(MetaRow.name == "service")).scalar()
    epoch, _, service = (found or "").partition(" ")
    return service if epoch == connection.execute(_EPOCH).scalar() else ""


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN IMMEDIATE"))
