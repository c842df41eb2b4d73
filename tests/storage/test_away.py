"""Whole services whose artifacts or database are away for a moment: jobs wait, resume by themselves, lose nothing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, select, text
from tests.storage.test_place import AWAY
from tests.support.disks import fill, make_read_only, mounted
from tests.support.faces import ThreadedWorker, job, served
from tests.support.s3 import S3, s3
from tests.support.storing import connected, new_database, postgres_cluster
from tests.support.waiting import until

from rookery.client import Client, Job, Record
from rookery.environments.checks import EnvironmentChecks
from rookery.errors import RookeryError, UserError
from rookery.server.launcher import EmbeddedService
from rookery.storage.models import VersionRow

ENDLESS = job(stop={"steps": 1_000_000}, checkpoints={"keep_last": 3, "keep_best": False})


@contextmanager
def running(root: Path, **settings: object) -> Iterator[tuple[EmbeddedService, Client]]:
    with ExitStack() as opened:
        service = opened.enter_context(served(root, **settings))
        opened.enter_context(ThreadedWorker.of(service))
        yield service, opened.enter_context(Client(service.url, service.key))


def trained(of: Job, more: int = 3) -> int:
    """Its step once it has trained so many more."""
    step = of.show().step
    until(lambda: of.show().step >= step + more)
    return int(of.show().step)


def paused(of: Job, reason: str = "") -> Record:
    """The job once it is paused with a reason that has this text. It may resume at any time, as to look again."""

    def shown() -> Record | None:
        view = of.show()
        return view if view.state == "paused" and reason in view.reason else None

    return until(shown, of.show)


def check_nothing_lost(of: Job) -> None:
    versions = of.versions()
    assert [row.version for row in versions] == list(range(len(versions)))
    assert not any(row.lost for row in versions)
    assert [row.step for row in of.metrics(follow=False)] == list(range(1, of.show().step + 1))


@pytest.mark.heavy
@pytest.mark.parametrize("leave", AWAY)
def test_a_job_waits_for_a_shared_folder(leave: Callable[[Path], Callable[[], object]], tmp_path: Path) -> None:
    """It waits while it runs and while it resumes; nobody resumes it; a start that finds the folder again keeps all."""
    shared = tmp_path / "shared"
    with running(tmp_path, artifacts_url=str(shared)) as (_, client):
        made = client.submit(ENDLESS)
        trained(made)
        for resumed in (False, True):
            if resumed:
                made.pause()
            back = leave(shared)
            if resumed:
                made.resume()
            assert str(tmp_path) not in paused(made, "place is away").reason, "a tenant reads no path"
            back()
            trained(made)
        made.pause()
        check_nothing_lost(made)
    here = {path.name for path in shared.iterdir()}
    assert str(shared) in (tmp_path / "data/logs/service.jsonl").read_text(), "the operator reads it"
    back = leave(shared)
    if not leave.__name__.startswith("lose"):
        with pytest.raises(UserError, match="shared"):
            served(tmp_path, artifacts_url=str(shared)).__enter__()
    back()
    with running(tmp_path, artifacts_url=str(shared)) as (_, client):
        again = client.job(made.id)
        assert here - {".orphans"} <= {path.name for path in shared.iterdir()}
        again.resume()
        trained(again)
        again.pause()
        check_nothing_lost(again)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("disk", "spoil", "reason"),
    [
        ("shared", make_read_only, r"the artifacts cannot be used \(read-only file system\)"),
        ("shared", fill, "the disk of the artifacts is full"),
        ("data", fill, "the database's disk is full|the disk of the artifacts is full"),
    ],
)
def test_a_job_resumes_as_soon_as_a_disk_takes_writes_again(
    disk: str, spoil: Callable[[Path], Callable[[], object]], reason: str, tmp_path: Path
) -> None:
    settings = {"artifacts_url": str(tmp_path / "shared"), "outage_retry_seconds": 3600.0}  # not by waiting
    with mounted(tmp_path / disk), running(tmp_path, **settings) as (_, client):
        made = client.submit(ENDLESS)
        trained(made)
        for _ in range(2):
            mend = spoil(tmp_path / disk)
            try:
                found = paused(made).reason
                assert re.match(reason, found), found
            finally:
                mend()
            trained(made)
        made.pause()
        check_nothing_lost(made)


@pytest.fixture
def bucket(s3_keys: None) -> Iterator[S3]:
    with s3() as server:
        yield server


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["slow down", "internal error", "no bucket", "expired", "denied", "flaky"])
def test_a_job_waits_for_an_object_store(mode: str, bucket: S3, tmp_path: Path) -> None:
    settings = {"artifacts_url": "s3://bucket/prefix", "artifacts_endpoint": bucket.endpoint}
    with running(tmp_path, outage_retry_seconds=1.0, store_retries=1, **settings) as (_, client):
        made = client.submit(ENDLESS)
        trained(made)
        for resumed in (False, True):
            if resumed:
                made.pause()
            bucket.mode = mode
            if resumed:
                made.resume()
            if mode != "flaky":
                reason = paused(made).reason
                assert "do not answer" in reason and "127.0.0.1" not in reason
            else:
                until(lambda wanted=bucket.refused + 3: bucket.refused >= wanted)
            bucket.mode = "ok"
            trained(made)
        made.pause()
        check_nothing_lost(made)
    bucket.mode = mode
    if mode != "flaky":
        with pytest.raises(RookeryError):
            served(tmp_path, **settings).__enter__()
    bucket.mode = "ok"
    with running(tmp_path, **settings) as (_, client):
        again = client.job(made.id)
        again.resume()
        trained(again)
        again.pause()
        check_nothing_lost(again)


@pytest.mark.heavy
def test_a_wrong_data_folder_changes_nothing(tmp_path: Path) -> None:
    """Neither alone, nor beside the right service while PostgreSQL restarts."""
    with postgres_cluster() as cluster:
        url = new_database(cluster.url)

        def refuse() -> None:
            with pytest.raises(UserError, match=r"wrong/data/artifacts.*postgresql://.*right/data/artifacts"):
                served(tmp_path / "wrong", database=url).__enter__()

        with running(tmp_path / "right", database=url) as (_, client):
            made = client.submit(ENDLESS)
            trained(made)
        rows, here = versions_in(url), {path.name for path in (tmp_path / "right/data/artifacts").iterdir()}
        refuse()
        assert versions_in(url) == rows
        assert not (tmp_path / "wrong/data/admin.key").exists()
        with running(tmp_path / "right", database=url) as (_, client):
            assert here <= {path.name for path in (tmp_path / "right/data/artifacts").iterdir()} | {".orphans"}
            again = client.job(made.id)
            for _ in range(2):
                trained(again)
                cluster.stop()
                cluster.start()
                refuse()
            trained(again)
            again.pause()
            check_nothing_lost(again)


def versions_in(url: str) -> list[tuple[object, ...]]:
    with connected(url) as connection:
        return [tuple(row) for row in connection.execute(select(VersionRow.version, VersionRow.kept, VersionRow.lost))]


def test_a_missing_artifact_makes_its_job_wait_until_it_is_back_or_given_up(tmp_path: Path) -> None:
    """The place is there, the artifact is not, as in a backup that is half restored. A person may give it up."""
    folder = tmp_path / "data" / "artifacts"
    with running(tmp_path, outage_retry_seconds=0.2) as (_, client):
        made = client.submit(ENDLESS)
        trained(made)
        made.pause()
        for file in ("", "adapter_model.safetensors", "manifest.json"):
            head = max(row.version for row in made.versions())
            path = folder / next(row.hash for row in made.versions() if row.version == head) / file
            path.rename(tmp_path / "kept")
            made.resume()
            paused(made, "of main is missing")
            (tmp_path / "kept").rename(path)
            trained(made)
            made.pause()
            check_nothing_lost(made)
        with pytest.raises(RookeryError, match="is there: resume it"):
            made.rollback()
        head = max(row.version for row in made.versions())
        shutil.rmtree(folder / next(row.hash for row in made.versions() if row.version == head))
        made.rollback()
        trained(made)
        assert [row.version for row in made.versions() if row.lost] == [head]
        assert any("is missing" in event.text for event in made.events() if event.kind == "corrupt")
        made.cancel()


def test_a_data_folder_of_a_version_without_marks_is_adopted(tmp_path: Path) -> None:
    with running(tmp_path) as (_, client):
        made = client.submit(job())
        made.wait()
    folder = tmp_path / "data" / "artifacts"
    (folder / "owner").unlink()
    engine = create_engine(f"sqlite:///{tmp_path}/data/rookery.db")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM meta WHERE name = 'artifacts'"))
    engine.dispose()
    with running(tmp_path) as (_, client):
        check_nothing_lost(client.job(made.id))
        assert (folder / "owner").exists()


def test_a_dataset_that_cannot_be_read_is_no_mistake_of_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that names one is refused for now, and its tenant reads no path of the service; the operator does."""

    def denied(checks: EnvironmentChecks, id: str, options: dict[str, object]) -> None:
        raise UserError(f"dataset: {options['path']} cannot be read (Permission denied); give a JSONL file")

    monkeypatch.setattr(EnvironmentChecks, "validate", denied)

    with served(tmp_path) as service, httpx.Client(base_url=service.url, timeout=60) as http:
        http.headers["Authorization"] = f"Bearer {service.key}"
        rows = http.post("/api/v1/datasets", content=b'{"prompt": "2+2?", "answer": "4"}\n').json()["dataset"]
        stored = tmp_path / "data" / "artifacts" / rows / "rows.jsonl"
        asked = job(environment={"id": "jsonl", "dataset": rows, "verifier": "exact"})
        for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run"):
            answer = http.post(path, json=asked)
            assert (answer.status_code, answer.json()["error"]) == (503, "the job's dataset could not be read")
    logged = (tmp_path / "data/logs/service.jsonl").read_text()
    assert str(stored) in logged, "the operator reads it"


@pytest.mark.parametrize("lost", ["database", "artifacts"])
def test_one_half_of_a_data_folder_is_refused(lost: str, tmp_path: Path) -> None:
    """A new database would delete every artifact; new artifacts would fail every job."""
    with running(tmp_path) as (_, client):
        client.submit(job()).wait()
    if lost == "database":
        for path in (tmp_path / "data").glob("rookery.db*"):
            path.unlink()
    else:
        shutil.rmtree(tmp_path / "data" / "artifacts")
    here = {path.name for path in tmp_path.rglob("data/artifacts/*")}
    with pytest.raises(UserError, match="belong to another database" if lost == "database" else "has none of the"):
        served(tmp_path).__enter__()
    assert here <= {path.name for path in tmp_path.rglob("data/artifacts/*")}
