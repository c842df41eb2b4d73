"""Lists by the page: what a page costs does not depend on the list's length, and a walk meets every row once."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event, text
from tests.support.draws import examples
from tests.support.faces import job, served
from tests.support.storing import visit

from rookery.client import Client
from rookery.protocol import Manifest
from rookery.server.launcher import EmbeddedService
from rookery.server.paging import FIRST_ROWS, NEXT, encoded, encoded_page
from rookery.server.schemas import MetricsRow
from rookery.storage.columns import LONGEST_PAGE, PAGE, Base, Page, add, columns
from rookery.storage.db import Database
from rookery.storage.models import (
    CheckpointRow,
    EvaluationRow,
    EventRow,
    KeyRow,
    SecretRow,
    StepRow,
    UploadRow,
    VersionRow,
)
from rookery.storage.repositories import jobs, sessions, tenants, versions
from rookery.turns import in_thread

ROWS = 20_000

TIME = "1.0 + i / 100"
NUMBERS = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS - 1})"

METRICS = {field.alias or name: 0 for name, field in MetricsRow.model_fields.items() if field.is_required()}

IDENTITY = ("id", "hash", "name", "version", "step")
"""Columns that tell the rows of a list apart."""

LATE = 1.0 + (ROWS - 200) // 100
"""The time of the rows of the last but one hundred; the newest are last, but first in lists of jobs and events."""

LISTS: dict[str, tuple[str, Any]] = {
    "jobs": ("/api/v1/jobs", (2.0, "job-000150")),
    "uploads": ("/api/v1/uploads", (LATE, f"{ROWS - 150:064}", "dataset")),
    "tenants": ("/api/v1/tenants", None),
    "keys": ("/api/v1/tenants/ADMIN/keys", (LATE, f"{ROWS - 150:064}")),
    "secrets": ("/api/v1/secrets", (f"secret-{ROWS - 150:06}",)),
    "versions": ("/api/v1/jobs/first/policies/main/versions", (ROWS - 150,)),
    "evaluations": ("/api/v1/jobs/first/evaluations", None),
    "metrics": ("/api/v1/jobs/first/metrics", ROWS - 150),
    "events": ("/api/v1/jobs/first/events", 1150),
    "sessions": ("/tinker/api/v1/sessions", "offset"),
    "training runs": ("/tinker/api/v1/training_runs", "offset"),
    "checkpoints": ("/tinker/api/v1/checkpoints", "offset"),
}
"""The path of each list, and a place near its end; the Tinker protocol counts rows."""

MOST_WORK = {
    "jobs": (8000, 100),
    "uploads": (40, 40),
    "tenants": (3000, 3000),
    "keys": (5500, 5500),
    "secrets": (40, 40),
    "versions": (60, 60),
    "evaluations": (40, 40),
    "metrics": (40, 40),
    "events": (40, 40),
    "sessions": (40, 1100),
    "training runs": (3000, 17_000),
    "checkpoints": (1900, 3700),  # counted and passed over without those that have expired
}
"""Hundreds of SQLite's instructions for the first page and for the last: a third above what they are. A page that an
index alone finds takes about 20; where more, its query reads or skips rows of the list that it does not return."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("paging"), workers=0) as running:
        fill(running)
        yield running


def fill(service: EmbeddedService) -> None:
    """Twenty thousand rows in every list of the administrator's tenant; each hundred have the same time."""
    database = Database(f"sqlite:///{service.settings.data}/rookery.db")
    admin = database.read(tenants.list_tenants)[0]
    with Client(service.url, service.key) as client:
        made = client.submit(job(name="first"))
        made.cancel()
        made.wait(60)
    first = database.read(jobs.get_job, admin.id, made.id)
    [policy] = database.read(jobs.policies, admin.id, made.id)
    visit(database, admin.id)
    [session], [model] = database.read(sessions.list_sessions, admin.id), database.read(sessions.list_models, admin.id)
    shared: dict[str, Any] = {"tenant": admin.id, "hash": "f" * 64, "created": 0.0}
    weights = {"manifest": Manifest(hash="0" * 64, shards=[]), "policy": policy.id, "version": -1}
    templates: dict[str, tuple[Base, dict[str, str]]] = {
        "jobs": (first, {"id": "printf('job-%06d', i)", "created": TIME, "number": "-i", "idempotency_key": "NULL"}),
        "uploads": (
            UploadRow(**shared, kind="dataset", size=1),
            {"hash": "printf('%064d', i)", "created": TIME},
        ),
        "sessions": (session, {"id": "printf('session-%06d', i)", "created": TIME}),
        "models": (model, {"id": "printf('model-%06d', i)", "created": TIME}),
        "checkpoints": (
            CheckpointRow(
                **shared, **weights, model=model.id, kind="weights", name="x", size=1, expires=None, about={}
            ),
            {"name": "printf('c%06d', i)", "created": TIME},
        ),
        "versions": (VersionRow(**shared, **weights, size=0, parent=None, step=0, kept=False), {"version": "i"}),
        "evaluations": (
            EvaluationRow(
                policy=policy.id, version=-1, tenant=admin.id, job=first.id, prompts=1, mean=0.5, stderr=0.0,
                results={"split": "eval", "seed": 1, "held_out": []}, created=0.0,
            ),
            {"version": "i"},
        ),
        "tenants": (admin, {"id": "printf('tenant-%06d', i)", "admin": "0", "created": f"created + {TIME}"}),
        "keys": (
            KeyRow(hash="f", tenant=admin.id, label="", created=0.0, role="host"),
            {"hash": "printf('%064d', i)", "created": TIME},
        ),
        "secrets": (
            SecretRow(tenant=admin.id, name="s", value="text", created=0.0),
            {"name": "printf('secret-%06d', i)", "created": TIME},
        ),
        "steps": (
            StepRow(job=first.id, step=-1, tenant=admin.id, version=-1, reward=0.5, metrics=METRICS),
            {"step": "i", "version": "i", "metrics": "json_set(metrics, '$.step', i)"},
        ),
        "events": (
            EventRow(id=999, tenant=admin.id, job=first.id, time=0.0, kind="state", text=""),
            {"id": "i + 1000", "text": "i"},
        ),
    }  # fmt: skip
    with database.writing() as connection:
        for table, (row, changes) in templates.items():
            if row not in (first, session, model, admin):
                add(connection, row)
            names = list(columns(row))
            key = {name: getattr(row, name) for name in changes if name in IDENTITY}
            chosen = " AND ".join(f"{name} = :{name}" for name in key)
            values = ", ".join(changes.get(name, name) for name in names)
            query = f"INSERT INTO {table} ({', '.join(names)}) {NUMBERS} SELECT {values} FROM n, {table} WHERE {chosen}"
            connection.execute(text(query), key)


@pytest.fixture
def http(service: EmbeddedService) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": service.key}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as client:
        yield client


def read(http: httpx.Client, path: str, **params: Any) -> httpx.Response:
    if "ADMIN" in path:
        path = path.replace("ADMIN", http.get("/api/v1/tenants", params={"limit": 1}).json()[0]["id"])
    return http.get(path, params=params)


def rows_of(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    body = response.json()
    return body if isinstance(body, list) else next(value for name, value in body.items() if name != "cursor")


class Work:
    """The work of SQLite for a service in this process, in hundreds of its instructions: the same on every machine."""

    def __init__(self) -> None:
        self.done = 0

    def count(self) -> int:
        self.done += 1
        return 0  # the statement goes on

    def watch(self, connection: Connection, *_: object) -> None:
        raw = connection.connection.driver_connection
        assert raw is not None
        raw.set_progress_handler(self.count, 100)


@pytest.fixture
def work() -> Iterator[Work]:
    found = Work()
    event.listen(Engine, "before_cursor_execute", found.watch)
    yield found
    event.remove(Engine, "before_cursor_execute", found.watch)


@pytest.mark.parametrize("name", LISTS)
def test_a_page_of_a_long_list_costs_its_rows_alone(http: httpx.Client, work: Work, name: str) -> None:
    path, late = LISTS[name]
    cursor = encoded(late) if isinstance(late, tuple) else late
    params = {"offset": ROWS - 50} if late == "offset" else {} if late is None else {"after": cursor}
    tracemalloc.start()
    try:
        steps = {}
        for part, asked in (("first", {}), ("last", params)):
            costs = []
            for _ in range(3):
                tracemalloc.reset_peak()
                held, before = tracemalloc.get_traced_memory()[0], work.done
                response = read(http, path, limit=PAGE, **asked)
                costs.append(work.done - before)
                assert tracemalloc.get_traced_memory()[1] - held < 4 << 20, part
            found = rows_of(response)
            assert 0 < len(found) <= PAGE
            if "tinker" not in path and part == "first":
                assert NEXT in response.headers and len(found) == PAGE
            steps[part] = min(costs)
    finally:
        tracemalloc.stop()
    most = MOST_WORK[name]
    assert steps["first"] < most[0] and steps["last"] < most[1], steps


def test_reads_of_a_long_job_cost_their_results_alone(service: EmbeddedService, work: Work) -> None:
    """Of a policy with twenty thousand versions that are not kept, and as many steps."""
    database = Database(f"sqlite:///{service.settings.data}/rookery.db")
    with closing(database):
        tenant = database.read(tenants.list_tenants)[0].id
        first = database.read(jobs.find_job, tenant, "first").id
        [policy] = database.read(jobs.policies, tenant, first)
        reads: list[tuple[Callable[..., Any], Sequence[Any]]] = [
            (versions.followed, (tenant, policy.id, 10**6)),
            (versions.newest_of_step, (tenant, policy.id, 1)),
            (versions.kept_of_policy, (tenant, policy.id, Page(10))),
            (versions.held_out_losses, (tenant, policy.id, [1, ROWS - 1])),
            (versions.steps_of_versions, (tenant, first, "main", [1, ROWS - 1])),
        ]
        for function, arguments in reads:
            before = work.done
            database.read(function, *arguments)
            assert work.done - before < 10, function


async def walk(sizes: list[int], limit: int, most: int) -> list[tuple[list[int], int]]:
    """The pages of rows of these sizes: the sizes of their rows, and their bytes."""
    rows, pages, last, more = list(enumerate(sizes)), list[tuple[list[int], int]](), -1, True

    async def fetch(count: int, behind: tuple[int, int] | None) -> list[tuple[int, int]]:
        return rows[(last if behind is None else behind[0]) + 1 :][:count]

    while more:
        page = await encoded_page(in_thread, limit, fetch, lambda row: b"%d" % 10 ** row[1], lambda row: row[0], most)
        pages.append(([size - 1 for size in json.loads(page.body, parse_int=len)], len(page.body)))
        more = NEXT in page.headers
        last = int(page.headers.get(NEXT, last))
    return pages


@settings(max_examples=examples(30), deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), max_size=80), even=st.integers(0, 3000), limit=st.integers(1, 100))
async def test_pages_of_large_rows_are_bounded_in_bytes(sizes: list[int], even: int, limit: int) -> None:
    """A walk meets every row once. A page but the last one reaches one of its limits; one of rows of the same size does
    not go further."""
    most = 10_000
    for drawn in (sizes, [even] * 80):
        pages = await walk(drawn, limit, most)
        assert [size for found, _ in pages for size in found] == drawn
        for found, size in pages:
            assert len(found) == limit or size >= most or found == pages[-1][0]
            if drawn is not sizes:
                assert size <= 2 + max(FIRST_ROWS * (even + 2), most + even + 2 * limit)


@pytest.mark.parametrize("name", [name for name, (path, _) in LISTS.items() if "tinker" not in path])
def test_pages_meet_every_row_once(http: httpx.Client, name: str) -> None:
    """Also among rows of the same time, and where the last row of a page is deleted."""
    path, _ = LISTS[name]
    whole, walked, after = rows_of(read(http, path, limit=240)), [], {}
    for _ in range(8):
        response = read(http, path, limit=30, **after)
        walked.append(rows_of(response))
        after = {"after": response.headers[NEXT]}
    if name == "events":  # the newest page first, each oldest first
        walked.reverse()
    found = [row for page in walked for row in page]
    if name == "tenants":  # their usage changes meanwhile
        found, whole = [row["id"] for row in found], [row["id"] for row in whole]
    assert found == whole


def test_place_of_a_deleted_row_is_a_place(http: httpx.Client) -> None:
    page = read(http, "/api/v1/uploads", limit=2)
    whole = rows_of(read(http, "/api/v1/uploads", limit=4))
    assert http.delete(f"/api/v1/uploads/{rows_of(page)[-1]['hash']}").status_code == 204
    assert rows_of(read(http, "/api/v1/uploads", limit=2, after=page.headers[NEXT])) == whole[2:]


@pytest.mark.parametrize(
    "after", ["x", "a" * 2001, encoded((1.0,)), encoded((1.0, "a", "b")), encoded(("a", 1.0)), encoded((1.0, "\x00")),
              encoded((float("nan"), "a")), encoded((True, "a")), encoded((1e300, "a"))],
)  # fmt: skip
def test_place_that_the_service_did_not_give_is_refused(http: httpx.Client, after: str) -> None:
    assert read(http, "/api/v1/jobs", after=after).status_code in (400, 422)


@pytest.mark.parametrize("limit", [0, -1, LONGEST_PAGE + 1, "x"])
def test_number_of_rows_of_a_page_is_bounded(http: httpx.Client, limit: Any) -> None:
    for path, _ in LISTS.values():
        if not path.endswith("/metrics"):
            assert read(http, path, limit=limit).status_code == 422, path


def test_client_walks_all_pages(service: EmbeddedService) -> None:
    with Client(service.url, service.key) as client:
        assert len({row.hash for row in client.uploads()}) >= ROWS
        assert len({row.id for row in client.tenants()}) == ROWS + 1
        assert [row.step for row in client.job("first").metrics(follow=False)] == list(range(ROWS))
