"""Backups of a service that works, with SQLite and with PostgreSQL, and the service that goes on from one."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.disks import small_files
from tests.support.faces import ThreadedWorker, job, served
from tests.support.storing import check_counted_bytes, everything, new_database, running_postgres, submit
from typer.testing import CliRunner

from rookery.cli import app
from rookery.client import Client
from rookery.errors import CorruptArtifact, StorageFull, UserError
from rookery.storage import migrations
from rookery.storage.artifacts import Artifacts, Place
from rookery.storage.backup import back_up, readable, restore
from rookery.storage.data_dir import DATABASE_FILE, DataFolder, sqlite_url
from rookery.storage.db import Database
from rookery.storage.repositories import tenants
from rookery.storage.repositories.versions import live_hashes

BACKUPS = 3


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_postgres() as server:
        yield server


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_backups_under_load_are_complete_and_jobs_resume_from_one(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Versions come and are deleted all the time: each backup has every artifact that its database names."""
    urls = [new_database(request.getfixturevalue("postgres")) if kind == "postgresql" else "" for _ in range(2)]
    data, restored = tmp_path / "one" / "data", tmp_path / "two" / "data"
    endless = job(stop={"steps": 1_000_000}, checkpoints={"keep_last": 1, "keep_best": False})
    backups = []
    with (
        served(tmp_path / "one", database=urls[0] or None) as service,
        Client(service.url, service.key) as client,
        ThreadedWorker.of(service),
    ):
        submitted = client.submit(endless)
        for _ in zip(submitted.metrics(), range(BACKUPS), strict=False):
            backups.append(tmp_path / f"backup{len(backups)}")
            back_up(data, urls[0], backups[-1])
        submitted.cancel()
    for backup in backups:
        with closing(Database(sqlite_url(backup))) as database, database.reading() as connection:
            named = live_hashes(connection)
        assert len(named) >= 2, "rows and a version"
        assert {Artifacts(backup / "artifacts").verify(digest).hash for digest in named} == named

    assert restore(backups[-1], restored, urls[1]) >= 2
    assert (restored / DATABASE_FILE).exists() == (kind == "sqlite")
    assert (restored / "worker.token").read_text() == (data / "worker.token").read_text()
    with served(tmp_path / "two", database=urls[1] or None) as service, Client(service.url, service.key) as client:
        assert service.key == (data / "admin.key").read_text().strip()
        again = client.job(submitted.id)
        committed = again.show().step
        assert committed >= 1
        with ThreadedWorker.of(service):
            steps = [row.step for row, _ in zip(again.metrics(), range(committed + 2), strict=False)]
            assert steps == list(range(1, committed + 3))
            again.cancel()


@pytest.mark.heavy
def test_a_copy_of_a_database_does_not_use_the_place_of_the_original(tmp_path: Path) -> None:
    """Neither that of a restored backup, nor of a snapshot of the data folder, however often it is started."""
    shared, copy = str(tmp_path / "shared"), tmp_path / "copy"
    with (
        served(tmp_path / "one", artifacts_url=shared) as service,
        Client(service.url, service.key) as client,
        ThreadedWorker.of(service),
    ):
        made = client.submit(job(stop={"steps": 1_000_000}, checkpoints={"keep_last": 1, "keep_best": False}))
        for _ in zip(made.metrics(), range(BACKUPS), strict=False):
            pass
        made.pause()
        back_up(tmp_path / "one" / "data", "", tmp_path / "backup", Place(shared))
        refused = rf"{shared} on .* in use by the service {service.url} with .*one/data on .*, not this one, "
        with pytest.raises(UserError, match=refused + r"rookery restore with .*restored"):
            restore(tmp_path / "backup", tmp_path / "restored", "", Place(shared))
        assert list((tmp_path / "restored").iterdir()) == []
        restore(tmp_path / "backup", copy / "data", "", Place(str(tmp_path / "other")))
        with pytest.raises(UserError, match=refused + r".*copy/data"):
            served(copy, artifacts_url=shared).__enter__()
        made.resume()
        for _ in zip(made.metrics(), range(made.show().step + 2), strict=False):
            pass
        made.cancel()
    with served(copy, artifacts_url=shared):
        pass  # the original has ended


def stored(data: Path) -> None:
    """A data folder without a service: one job, an upload that is an artifact."""
    with DataFolder(data) as folder, closing(Database(folder.database_url)) as database:
        database.create()
        database.write(tenants.create_tenant, "alice", "Alice", 0.0)
        submit(database)
        folder.admin_key(), folder.worker_token()
        with Artifacts(folder.artifacts).begin() as staging:
            staging.write("rows.jsonl", [b"rows"])
            database.write(tenants.add_upload, "alice", "dataset", staging.commit().hash, 4, 0.0)
        database.write(tenants.add_event, "alice", "job", 0.0, "text", "an event")


def test_a_backup_holds_every_row_and_moves_to_another_kind_of_database(postgres: str, tmp_path: Path) -> None:
    stored(tmp_path / "data")
    assert back_up(tmp_path / "data", "", tmp_path / "one") == 1
    url = new_database(postgres)
    restore(tmp_path / "one", tmp_path / "restored", url)
    assert everything(url) == everything(sqlite_url(tmp_path / "data"))
    assert back_up(tmp_path / "restored", url, tmp_path / "two") == 1
    assert everything(sqlite_url(tmp_path / "two")) == everything(url)
    with closing(Database(url)) as database:
        database.write(tenants.add_event, "alice", "job", 1.0, "text", "numbered after the restored ones")
        assert [row.id for row in database.read(tenants.events, "alice", "job", 9)] == [1, 2]
    check_counted_bytes(url)
    for name in ("rookery.db", "admin.key", "worker.token"):
        assert (tmp_path / "two" / name).stat().st_mode & 0o077 == 0
    assert (tmp_path / "two").stat().st_mode & 0o077 == 0


def test_job_that_is_deleted_during_a_backup_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "data")
    for name in ("one", "two"):
        (tmp_path / "data/jobs" / name / "tensorboard").mkdir(parents=True)
    real = shutil.copytree

    def late(source: Path, target: Path, *others: Any, **named: Any) -> Any:
        if Path(source).name == "one":
            shutil.rmtree(source)
        return real(source, target, *others, **named)

    monkeypatch.setattr("rookery.storage.backup.shutil.copytree", late)
    back_up(tmp_path / "data", "", tmp_path / "backup")
    assert [folder.name for folder in (tmp_path / "backup/jobs").iterdir()] == ["two"]


@pytest.mark.parametrize("most", [4096, 1 << 20], ids=["database", "job"])
def test_a_full_disk_ends_a_backup_and_a_restore_which_can_be_repeated(most: int, tmp_path: Path) -> None:
    stored(tmp_path / "data")
    (tmp_path / "data/jobs/one").mkdir()
    (tmp_path / "data/jobs/one/events").write_bytes(bytes(2 << 20))
    back_up(tmp_path / "data", "", tmp_path / "backup")
    with small_files(most):
        with pytest.raises(StorageFull, match=f"backup to {tmp_path}/full failed: the disk of {tmp_path} is full"):
            back_up(tmp_path / "data", "", tmp_path / "full")
        with pytest.raises(StorageFull, match=f"restore into .*/new failed: the disk of {tmp_path}/new is full"):
            restore(tmp_path / "backup", tmp_path / "new", "")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "backup", "new"}
    restore(tmp_path / "backup", tmp_path / "new", "")  # what the first attempt left is no obstacle
    assert everything(sqlite_url(tmp_path / "new")) == everything(sqlite_url(tmp_path / "data"))
    with pytest.raises(UserError, match="is inside of"):
        back_up(tmp_path / "data", "", tmp_path / "data" / "backup")


def test_restoring_over_something_is_refused_in_one_line(postgres: str, tmp_path: Path) -> None:
    stored(tmp_path / "data")
    back_up(tmp_path / "data", "", tmp_path / "backup")
    with pytest.raises(UserError, match="exists"):
        back_up(tmp_path / "data", "", tmp_path / "backup")
    before = everything(sqlite_url(tmp_path / "data"))
    with pytest.raises(UserError, match="is not empty"):
        restore(tmp_path / "backup", tmp_path / "data", "")
    assert everything(sqlite_url(tmp_path / "data")) == before
    url = new_database(postgres)
    restore(tmp_path / "backup", tmp_path / "first", url)
    with pytest.raises(UserError, match="is not empty"):
        restore(tmp_path / "backup", tmp_path / "second", url)
    assert list((tmp_path / "second").iterdir()) == []
    (tmp_path / "volume" / "lost+found").mkdir(parents=True)  # as every new one has
    restore(tmp_path / "backup", tmp_path / "volume", "")
    assert everything(sqlite_url(tmp_path / "volume")) == before
    with pytest.raises(UserError, match="no backup"):
        restore(tmp_path / "nowhere", tmp_path / "second", "")
    with pytest.raises(UserError, match="has no database"):
        back_up(tmp_path / "nowhere", "", tmp_path / "another")


def test_database_of_an_earlier_version_is_refused_as_it_is(tmp_path: Path) -> None:
    """It is that of a service which this Rookery's restore would lock out."""
    stored(tmp_path / "data")
    back_up(tmp_path / "data", "", tmp_path / "backup")
    with tarfile.open(Path(__file__).parents[1] / "data" / "data_folder_0001.tar.xz") as file:
        file.extractall(tmp_path / "old", filter="data")
    url = sqlite_url(tmp_path / "old")
    with pytest.raises(UserError, match="is not empty; give a new one"):
        restore(tmp_path / "backup", tmp_path / "new", url)
    with closing(Database(url)) as database, database.reading() as connection:
        assert migrations.revision(connection) == "0001"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_damaged_backup_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    stored(tmp_path / "data")
    back_up(tmp_path / "data", "", tmp_path / "backup")
    (file,) = (tmp_path / "backup" / "artifacts").glob("*/rows.jsonl")
    file.unlink()  # not written to: it may be a hard link of the service's own
    file.write_bytes(b"worn")
    with pytest.raises(CorruptArtifact, match=r"rows\.jsonl does not have the hash"):
        restore(tmp_path / "backup", tmp_path / "restored", "")
    assert list((tmp_path / "restored").iterdir()) == []


def test_a_restore_fills_the_folders_to_which_links_lead(tmp_path: Path) -> None:
    """As where the artifacts have a disk that is not the data folder's."""
    stored(tmp_path / "data")
    back_up(tmp_path / "data", "", tmp_path / "backup")
    disk, new = tmp_path / "disk", tmp_path / "new"
    disk.mkdir()
    new.mkdir()
    (new / "artifacts").symlink_to(disk)
    (disk / "owner").write_text("another database")
    with pytest.raises(UserError, match="is not empty"):
        restore(tmp_path / "backup", new, "")
    assert {path.name for path in disk.iterdir()} == {"owner"}
    (disk / "owner").unlink()
    (file,) = (tmp_path / "backup" / "artifacts").glob("*/rows.jsonl")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(b"worn")
    with pytest.raises(CorruptArtifact, match=r"rows\.jsonl does not have the hash"):
        restore(tmp_path / "backup", new, "")
    assert [*disk.iterdir()] == [] and [path.name for path in new.iterdir()] == ["artifacts"]
    file.write_bytes(content)
    restore(tmp_path / "backup", new, "")
    assert everything(sqlite_url(new)) == everything(sqlite_url(tmp_path / "data"))
    assert [*disk.glob("*/rows.jsonl")]


def test_a_backup_without_an_artifact_that_the_database_names_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / "data")
    artifacts = Artifacts(tmp_path / "data" / "artifacts")
    artifacts.delete(*artifacts.hashes())
    with pytest.raises(UserError, match="has none of the 1 artifact "):
        back_up(tmp_path / "data", "", tmp_path / "backup")
    assert {path.name for path in tmp_path.iterdir()} == {"data"}
    assert list((tmp_path / "data" / "artifacts" / ".staging").iterdir()) == []


def test_the_commands(tmp_path: Path) -> None:
    stored(tmp_path / "data")
    for command, data in (("backup", "data"), ("restore", "restored")):
        result = CliRunner().invoke(app, [command, str(tmp_path / "backup"), "--data", str(tmp_path / data)])
        assert result.exit_code == 0 and "1 artifact" in result.output, result.output
    assert everything(sqlite_url(tmp_path / "restored")) == everything(sqlite_url(tmp_path / "data"))


def test_artifacts_of_another_place_are_backed_up_and_restored_to_another_place(tmp_path: Path) -> None:
    stored(tmp_path / "data")
    local = Artifacts(tmp_path / "data" / "artifacts")
    local.root.rename(tmp_path / "shared")
    local.root.mkdir()
    assert back_up(tmp_path / "data", "", tmp_path / "backup", Place(str(tmp_path / "shared"))) == 1
    assert restore(tmp_path / "backup", tmp_path / "restored", "", Place(str(tmp_path / "new"))) == 1
    shared = Artifacts(tmp_path / "new")
    assert {shared.verify(digest).hash for digest in shared.hashes()} == Artifacts(tmp_path / "shared").hashes()
    assert Artifacts(tmp_path / "restored" / "artifacts").hashes() == set()


def test_a_folder_that_may_not_be_written_is_backed_up_only_without_later_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reads such a database without the log beside it, in which the last commits are."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
        log = tmp_path / f"{DATABASE_FILE}-wal"
        for written in (b"", b"commits"):
            log.write_bytes(written)
            if not written:
                assert "immutable" in readable(tmp_path, "")
        with pytest.raises(UserError, match="later writes: back up a writable copy"):
            readable(tmp_path, "")


def test_no_password_is_shown(tmp_path: Path) -> None:
    given = "sqlite:///%s/x.db?timeout=3&password=S3CRET"
    assert Database(given % tmp_path).owner().shown == f"sqlite:///{tmp_path}/x.db"
