"""Backup of a data folder and its database, also while the service runs, and restore.

* A backup is a folder: ``rookery.db`` (SQLite, whichever database the service uses), ``artifacts/``, ``jobs/`` and the
  two secrets. It appears under its name once it is complete and on the disk. Nothing is written into its source.
* Its database is one snapshot, and every artifact that the snapshot names is there: hard links, or copies on another
  disk, keep them, and where one was deleted before, another snapshot is taken. No writer waits for a
  backup.
* A restore fills an empty data folder, and an empty PostgreSQL database where one is given; it hashes every artifact
  and leaves nothing behind if one is damaged. A database that is not empty is refused before anything else is done, and
  stays as it is. Jobs resume at the last commits of the snapshot.
* Artifacts are taken from, and restored to, the place that the settings name.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, TypeDecorator, column, delete, func, insert, select, table

from rookery.errors import NotFound, StorageFull, Unavailable, UserError, shortages
from rookery.protocol import Manifest
from rookery.storage import migrations
from rookery.storage.artifacts import DATA_FOLDER, Artifacts, Place
from rookery.storage.columns import Base
from rookery.storage.data_dir import (
    ADMIN_KEY_FILE,
    DATABASE_FILE,
    LOCK_FILE,
    WORKER_TOKEN_FILE,
    DataFolder,
    sqlite_url,
)
from rookery.storage.db import Database
from rookery.storage.models import EventRow, TenantRow
from rookery.storage.opening import artifacts_at, open_artifacts
from rookery.storage.place import WATCH_SECONDS, Lease, incarnation
from rookery.storage.repositories.versions import live_hashes

SNAPSHOTS = 20
"""Most snapshots of one backup. Artifacts of one stay for the next, so a second one lacks only those that were written
and deleted while the last few were linked; many mean that an artifact is lost."""

LOST_AND_FOUND = "lost+found"
"""A new volume has this folder."""

ROWS_AT_ONCE = 1000
"""Rows of a table that are held in memory."""


def back_up(data: Path, url: str, target: Path, place: Place = DATA_FOLDER) -> int:
    """Back up the data folder ``data``, its database and the artifacts at ``place`` to the new folder ``target``;
    returns the number of artifacts. ``url``: the database, where it is not the one in the data folder. Raises
    :class:`UserError`, :class:`Unavailable`, :class:`StorageFull`; then there is no ``target``."""
    target = target.resolve()
    if target.exists():
        raise UserError(f"{target} exists; give the backup a new folder")
    if not (data / "artifacts").is_dir() or not (url or (data / DATABASE_FILE).is_file()):
        raise UserError(f"{data} has no database; give the service's data folder with --data, or its ROOKERY_DATABASE")
    artifacts = artifacts_at(place, data / "artifacts")
    for source in (data, artifacts.root):
        if target.is_relative_to(source.resolve()):
            raise UserError(f"{target} is inside of {source}, which it is a backup of; give a folder elsewhere")
    with _one_line(f"backup to {target}", target.parent), closing(Database(readable(data, url))) as database:
        artifacts.inspect(database.owner())
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".backup-") as name:
            partial = Path(name)
            kept = partial / "artifacts"
            kept.mkdir(mode=0o700)
            named = _snapshot(database, sqlite_url(partial), artifacts, kept)
            for folder in kept.iterdir():
                if folder.name not in named:
                    shutil.rmtree(folder)
            _copy_jobs(data / "jobs", partial / "jobs")
            for secret in (ADMIN_KEY_FILE, WORKER_TOKEN_FILE):
                shutil.copy2(data / secret, partial / secret)
            os.sync()
            partial.rename(target)
    return len(named)


def restore(backup: Path, data: Path, url: str, place: Place = DATA_FOLDER) -> int:
    """Restore ``backup`` into the empty or missing data folder ``data``, its artifacts to ``place`` and, where ``url``
    is given, that empty database; returns the number of artifacts. Raises :class:`UserError` where either is not empty,
    :class:`CorruptArtifact`, :class:`StorageFull`; then the data folder is as it was."""
    if not (backup / DATABASE_FILE).is_file():
        raise UserError(f"{backup} is no backup: it has no {DATABASE_FILE}")
    if not _is_empty(data):
        raise UserError(f"data folder {data} is not empty; restore into a new one with --data")
    with _one_line(f"restore into {data}", data), DataFolder(data) as folder:
        try:
            if url:
                with closing(Database(url)) as target:
                    _refuse_filled(target)
            for name in ("artifacts", "jobs"):
                shutil.copytree(backup / name, data / name, dirs_exist_ok=True, copy_function=_copy)
            for name in (ADMIN_KEY_FILE, WORKER_TOKEN_FILE, DATABASE_FILE):
                shutil.copy2(backup / name, data / name)
            local = Artifacts(folder.artifacts)
            with closing(Database(folder.database_url)) as database:
                database.create()  # migrates that of an earlier version
                new = replace(database.owner(), where="", named=frozenset[str]()) if place.url else database.owner()
                artifacts = open_artifacts(place, folder.artifacts, new)
                with _held(artifacts, folder), database.reading() as connection:
                    named = live_hashes(connection)
                    for digest in named:
                        manifest = local.verify(digest)
                        if place.url:
                            _move(local, artifacts, manifest)
                    if url:
                        _fill(url, connection)
            if url:
                (data / DATABASE_FILE).unlink()
            os.sync()
        except BaseException:
            _clear(data)
            raise
    return len(named)


def _is_empty(data: Path) -> bool:
    """Whether nothing is stored there, nor where links there lead, such as one to another disk. A start that found the
    disk full leaves empty folders."""
    for _, folders, files in os.walk(data, followlinks=True):
        folders[:] = (name for name in folders if name != LOST_AND_FOUND)
        if any(name != LOCK_FILE for name in files):
            return False
    return True


def _clear(folder: Path) -> None:
    """Delete what lies in ``folder``, and where links to other folders lead: those stay, and so does what they lead
    to."""
    for entry in folder.iterdir():
        if entry.name == LOST_AND_FOUND:
            continue
        if entry.is_symlink() and entry.is_dir():
            _clear(entry)
        elif entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _copy_jobs(source: Path, target: Path) -> None:
    """Copy the folders of jobs but for those that are deleted meanwhile."""
    target.mkdir(mode=0o700)
    for folder in filter(Path.is_dir, source.iterdir()):
        try:
            shutil.copytree(folder, target / folder.name, copy_function=_copy)
        except (FileNotFoundError, shutil.Error):
            if folder.exists():
                raise
            shutil.rmtree(target / folder.name, ignore_errors=True)


def readable(data: Path, url: str) -> str:
    """The URL of the database to read. SQLite would change that of a data folder that may not be written, such as a
    snapshot of a disk; it reads that one as it is, without a log of later writes. Raises ``UserError`` where one is."""
    if url or os.access(data, os.W_OK):
        return url or sqlite_url(data)
    log = data / f"{DATABASE_FILE}-wal"
    if log.exists() and log.stat().st_size:
        raise UserError(f"{data} may not be written, and its {log.name} has later writes: back up a writable copy")
    file = f"file:{quote(str(data.resolve() / DATABASE_FILE))}"
    return URL.create("sqlite", database=file, query={"immutable": "1", "uri": "true"}).render_as_string()


def _snapshot(database: Database, target: str, artifacts: Artifacts, kept: Path) -> Collection[str]:
    """Copy one snapshot of the database to the new database ``target``, with the artifacts that it names linked
    into the folder ``kept``; returns their hashes."""
    with closing(Database(target)) as copy:
        copy.create()
        lost: NotFound | None = None
        for _ in range(SNAPSHOTS):
            with database.reading() as connection:
                found = migrations.revision(connection)
                if found != migrations.HEAD:
                    raise UserError(f"the database has revision {found}, not {migrations.HEAD}: start its service once")
                named = live_hashes(connection)
                try:
                    for digest in named:
                        if not (kept / digest).exists():
                            artifacts.link(digest, kept / digest)
                except NotFound as error:
                    lost = error
                    continue
                with copy.writing() as copied:
                    _copy_rows(connection, copied)
                return named
        raise UserError(f"the database names an artifact that is lost: {lost}")


def _fill(url: str, source: Connection) -> None:
    """Copy every row to the empty database ``url``."""
    with closing(Database(url)) as target:
        target.claim()
        _refuse_filled(target)  # a service may have been there since
        target.create()
        try:
            with target.writing() as connection:
                _copy_rows(source, connection)
        except StorageFull:
            raise Unavailable("the disk of the database that ROOKERY_DATABASE names is full; free some space") from None


def _refuse_filled(target: Database) -> None:
    """Change nothing. Raises :class:`UserError` unless the database has no tables, or those of this version of Rookery
    without a tenant."""
    try:
        if target.owner().identity is None:
            return
        with target.reading() as connection:
            current = migrations.revision(connection) == migrations.HEAD
            if current and connection.execute(select(TenantRow.id).limit(1)).first() is None:
                return
    except Unavailable as error:
        raise UserError(f"the database that ROOKERY_DATABASE names cannot be read: {error.detail or error}") from None
    raise UserError("the database that ROOKERY_DATABASE names is not empty; give a new one")


def _copy_rows(source: Connection, target: Connection) -> None:
    """Copy every row to a database that has the tables and no rows but its own facts."""
    migrations.stop_counting(target)
    for model in Base.metadata.sorted_tables:
        types = {c.name: c.type.impl if isinstance(c.type, TypeDecorator) else c.type for c in model.columns}
        plain = table(model.name, *(column(name, type) for name, type in types.items()))  # values stay encoded
        target.execute(delete(plain))
        found = source.execution_options(yield_per=ROWS_AT_ONCE).execute(select(plain))
        for part in found.mappings().partitions():
            target.execute(insert(plain), [dict(row) for row in part])
    migrations.start_counting(target)
    if target.dialect.name == "postgresql":
        newest = select(func.coalesce(func.max(EventRow.id), 0) + 1).scalar_subquery()
        target.execute(select(func.setval(func.pg_get_serial_sequence("events", "id"), newest, False)))


def _move(source: Artifacts, target: Artifacts, manifest: Manifest) -> None:
    with target.begin() as staging:
        for shard in manifest.shards:
            with source.reading(manifest.hash, shard) as chunks:
                staging.write(shard.name, chunks)
        staging.commit()
    source.delete(manifest.hash)


@contextmanager
def _held(artifacts: Artifacts, folder: DataFolder) -> Iterator[None]:
    """Within, no service uses the place of ``artifacts``. Raises :class:`UserError` where one does."""
    lease = Lease(incarnation(secrets.token_hex(16), "rookery restore", folder.root, folder.locks))
    while not artifacts.hold(lease):
        time.sleep(WATCH_SECONDS)
    try:
        yield
    finally:
        artifacts.release()


def _copy(source: str, target: str) -> None:
    """Raises :class:`StorageFull` at once: ``copytree`` collects errors of the system and goes on."""
    with shortages("the disk"):
        shutil.copy2(source, target)


@contextmanager
def _one_line(action: str, disk: Path) -> Iterator[None]:
    """``disk``: the folder that is written to. A full one is named as such, also where its database met it."""
    try:
        with shortages():
            yield
    except StorageFull as full:
        raise StorageFull(f"{action} failed: the disk of {disk} is full; free some space there") from full
    except (OSError, shutil.Error) as error:
        raise UserError(f"{action} failed: {error}") from error
