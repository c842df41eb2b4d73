"""Names of jobs and tenants: each means one thing wherever it may stand, and tenants come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.faces import MODEL, ThreadedWorker, job, served
from tests.support.waiting import until

from rookery.client import Client, RequestRefused
from rookery.errors import Conflict, NotFound, RookeryError, Unauthorized
from rookery.server.launcher import EmbeddedService
from rookery.storage.data_dir import DATABASE_FILE
from rookery.storage.db import Database
from rookery.storage.repositories import jobs, tenants


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("names")) as running, ThreadedWorker.of(running):
        yield running


@pytest.fixture
def admin(service: EmbeddedService) -> Iterator[Client]:
    with Client(service.url, service.key) as client:
        yield client


def admin_get(service: EmbeddedService, path: str) -> object:
    response = httpx.get(f"{service.url}{path}", headers={"X-API-Key": service.key}, timeout=60)
    return response.raise_for_status().json()


def test_a_job_is_named_in_the_same_ways_everywhere(service: EmbeddedService, admin: Client) -> None:
    old, new = (admin.submit(job(name="twice", seed=seed)) for seed in (1, 2))
    for one in (old, new):
        assert one.wait(60).state == "completed"
    assert admin.job("twice").id == admin.job("twice~0").id == new.id and admin.job("twice~1").id == old.id
    named = {"twice": new, "twice~1": old, old.id: old}
    for name, meant in named.items():
        assert admin.job(name).id == meant.id
        for path in ("", "/metrics", "/events", "/evaluations", "/policies/main/versions"):
            direct = admin_get(service, f"/api/v1/jobs/{meant.id}{path}")
            assert admin_get(service, f"/api/v1/jobs/{name}{path}") == direct
        for target in (name, f"{name}@1", f"{name}:latest"):
            assert admin.sample(target, "2+2?", seed=2).text == "4"
            assert "".join(admin.stream(target, "2+2?", seed=2)) == "4"
        start = {"job": name, "version": 0}
        policies = {"main": {"rank": 4, "targets": ["q"], "warm_start": start}}
        assert admin.dry_run(job(policies=policies)).spec.name == "sums"
    for wrong in ("twice~2", "twice~", "nobody", "twice~1~1"):
        with pytest.raises(NotFound):
            admin.job(wrong)
        with pytest.raises(NotFound):
            admin.sample(wrong, "hello")
    with pytest.raises(RequestRefused, match="no job twice~2"):
        admin.dry_run(job(policies={"main": {"warm_start": {"job": "twice~2"}}}))


def test_a_base_models_name_means_the_model(admin: Client) -> None:
    shadow = admin.submit(job(name=MODEL))
    assert shadow.wait(60).state == "completed"
    assert admin.sample(MODEL, "2+2?", seed=2).policy == ""
    assert admin.sample(f"{MODEL}~0", "2+2?", seed=2).policy == shadow.show().policies[0].id
    assert admin.job(MODEL).id == shadow.id


def test_tenants_are_created_renamed_and_deleted_by_name(service: EmbeddedService, admin: Client) -> None:
    ada = admin.add_tenant("ada")
    for call in (lambda: admin.add_tenant("ada"), lambda: admin.add_tenant(ada.id)):
        with pytest.raises(Conflict, match=f"tenant {ada.id} is called"):
            call()
    assert admin.rename_tenant("ada", "ada-2").id == ada.id
    assert admin.rename_tenant("ada-2", "ada-2").name == "ada-2"
    again = admin.add_tenant("ada")
    key = admin.add_key("ada").key
    with Client(service.url, key) as client:
        finished = client.submit(job(name="finished"))
        finished.wait(60)
        running = client.submit(job(name="running", environment={"hosted": "nobody"}))
        assert client.uploads()
        with pytest.raises(Conflict, match=r"has 1 job that has not ended .*--force"):
            admin.delete_tenant("ada")
        assert running.show().state in ("queued", "running"), "a refused deletion changes nothing"
        admin.delete_tenant("ada", force=True)
        for ask in (client.views, lambda: client.submit(job())):
            with pytest.raises(Unauthorized):
                ask()
    with pytest.raises(NotFound):
        admin.add_key(again.id)
    assert [row.name for row in admin.tenants()] == ["admin", "ada-2"]
    assert all(row.tenant != again.id for row in admin.costs().tenants), "it cost nothing"
    third = admin.add_tenant("ada")
    assert third.id not in (ada.id, again.id) and admin.keys("ada") == []
    with Client(service.url, admin.add_key("ada").key) as client:
        assert client.views() == [] and client.uploads() == []
    with pytest.raises(Conflict, match="administrator"):
        admin.delete_tenant("admin")
    for name in ("", "a b", "x" * 101, "é", "a\n"):
        with pytest.raises(RookeryError):
            admin.rename_tenant("ada-2", name)


def test_an_interrupted_deletion_is_finished_at_the_next_start(tmp_path: Path) -> None:
    with served(tmp_path) as first, Client(first.url, first.key) as admin:
        ada = admin.add_tenant("ada").id
        with Client(first.url, admin.add_key("ada").key) as client:
            client.submit(job(name="left", environment={"hosted": "nobody"}))
    database = Database(f"sqlite:///{tmp_path}/data/{DATABASE_FILE}")
    database.create()
    database.write(tenants.delete_tenant, ada, 1.0)  # and the service ends before it has deleted anything
    assert database.read(tenants.half_deleted) == {ada}
    database.close()
    with served(tmp_path):
        database = Database(f"sqlite:///{tmp_path}/data/{DATABASE_FILE}")
        until(lambda: not database.read(tenants.half_deleted))
        assert database.read(jobs.list_jobs, ada) == []
        database.close()
