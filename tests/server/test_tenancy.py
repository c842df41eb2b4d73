"""No tenant can learn anything about another, or change it, through any route. Real service, real sockets.

The routes come from the application itself. A new route either takes its ids from its path, and is then tested with
another tenant's ids automatically, or must be added to :data:`WITHOUT_IDS` with a test.
"""

from __future__ import annotations

import gc
import io
import json
import re
import tarfile
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.faces import MODEL, ThreadedWorker, adapter_files, job, served
from tests.support.waiting import until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

import rookery
from rookery import protocol
from rookery.client import Client
from rookery.errors import UserError
from rookery.server.app import build
from rookery.server.launcher import EmbeddedService
from rookery.server.routes.admin import KEY_ID
from rookery.storage.data_dir import hash_key

PATIENCE = 120.0
"""Timeout of every wait, in seconds: far more than anything here takes on a busy machine."""

SECRET = "the-owl-flies-at-noon"
"""Part of Ada's prompts, names and uploads; no other tenant may ever read it."""

NO_KEY = "no API key; send 'Authorization: Bearer tml-…' or 'X-API-Key: tml-…'"
UNKNOWN_KEY = "the API key is unknown: keys begin with tml-; this one is mistyped, or that of another service"

WITHOUT_IDS = {
    "GET /v1/files": "test_files_and_fine_tuning_jobs_are_their_owners",
    "POST /v1/files": "test_files_and_fine_tuning_jobs_are_their_owners",
    "GET /v1/fine_tuning/jobs": "test_files_and_fine_tuning_jobs_are_their_owners",
    "POST /v1/fine_tuning/jobs": "test_files_and_fine_tuning_jobs_are_their_owners",
    "POST /v1/fine_tuning/alpha/graders/run": "test_files_and_fine_tuning_jobs_are_their_owners",
    "POST /v1/fine_tuning/alpha/graders/validate": "test_files_and_fine_tuning_jobs_are_their_owners",
    "GET /api/v1/jobs": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/runs": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/secrets": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/usage": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/usage.csv": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/account": "test_lists_contain_only_the_tenants_objects",
    "GET /": "test_lists_contain_only_the_tenants_objects",
    "POST /api/v1/sign-in": "test_a_cookie_opens_the_routes_of_its_key",
    "POST /api/v1/sign-out": "test_a_cookie_opens_the_routes_of_its_key",
    "POST /api/v1/sign-in/links": "test_a_cookie_opens_the_routes_of_its_key",
    "GET /api/v1/models": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/health": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/workers": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/workers/events": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/timeline": "test_timeline_shows_the_work_of_others_without_a_name",
    "GET /api/v1/timeline/trace": "test_timeline_shows_the_work_of_others_without_a_name",
    "GET /api/v1/workers/pools": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/costs": "test_lists_contain_only_the_tenants_objects",
    "GET /api/v1/tenants": "test_lists_contain_only_the_tenants_objects",
    "GET /v1/models": "test_lists_contain_only_the_tenants_objects",
    "GET /readyz": "test_lists_contain_only_the_tenants_objects",
    "GET /healthz": "test_lists_contain_only_the_tenants_objects",
    "GET /metrics": "test_lists_contain_only_the_tenants_objects",
    "POST /api/v1/tenants": "test_lists_contain_only_the_tenants_objects",
    "POST /api/v1/jobs": "test_job_cannot_name_another_tenants_objects",
    "POST /api/v1/jobs/dry-run": "test_job_cannot_name_another_tenants_objects",
    "POST /api/v1/sample": "test_another_tenants_policies_cannot_be_sampled",
    "POST /v1/chat/completions": "test_another_tenants_policies_cannot_be_sampled",
    "POST /v1/completions": "test_another_tenants_policies_cannot_be_sampled",
    "POST /v1/responses": "test_another_tenants_policies_cannot_be_sampled",
    "POST /v1/responses/input_tokens": "test_another_tenants_policies_cannot_be_sampled",
    "POST /inference/v1/generate": "test_another_tenants_policies_cannot_be_sampled",
    "POST /api/v1/datasets": "test_hash_is_not_a_permission",
    "POST /api/v1/adapters": "test_hash_is_not_a_permission",
    "GET /api/v1/uploads": "test_lists_contain_only_the_tenants_objects",
    "WEBSOCKET /wire/worker": "test_each_role_of_a_key_opens_its_routes",
    "WEBSOCKET /wire/host": "test_each_role_of_a_key_opens_its_routes",
}
"""Routes without an id in their path, and the test here that tries them."""

NOT_OURS = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/tinker"}
"""The framework's own, which know nobody; and an application of its own, which test_tinker_rest.py tries in the same
way."""


class Listening(ThreadedWorker):
    """Keeps the references and tickets that it is given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.refs: list[protocol.AdapterRef] = []
        self.uploads: list[str] = []

    async def _pull(self, http: httpx.AsyncClient, ref: protocol.AdapterRef) -> None:
        self.refs.append(ref)
        await super()._pull(http, ref)

    async def _push(self, http: httpx.AsyncClient, ticket: str, files: dict[str, bytes]) -> protocol.Manifest:
        self.uploads.append(ticket)
        return await super()._push(http, ticket, files)


@dataclass
class Town:
    """A service, its administrator, and two tenants. Ada has a completed job, a paused one and uploads; Bob asks."""

    root: Path
    service: EmbeddedService
    worker: Listening
    admin: httpx.Client
    ada: httpx.Client
    bob: httpx.Client
    keys: dict[str, str] = field(default_factory=dict)
    tenant: str = ""
    """Ada's tenant id."""
    done: dict[str, Any] = field(default_factory=dict)
    paused: str = ""
    dataset: str = ""
    adapter: str = ""
    versions: list[dict[str, Any]] = field(default_factory=list)

    @property
    def token(self) -> str:
        return (self.root / "data" / "worker.token").read_text().strip()

    def adas(self) -> list[str]:
        """Everything that Ada has, as she sees it."""
        paths = ["/api/v1/jobs"]
        for id in (self.done["id"], self.paused):
            parts = ("", "/metrics", "/events", "/trajectories", "/evaluations", "/policies/main/versions")
            paths += [f"/api/v1/jobs/{id}{part}" for part in parts]
        return [self.ada.get(path).text for path in paths]


def ended(client: httpx.Client, id: str) -> dict[str, Any]:
    """The job when it has ended."""
    with client.stream("GET", f"/api/v1/jobs/{id}/metrics/stream", timeout=PATIENCE) as response:
        for _ in response.iter_lines():
            pass
    view: dict[str, Any] = client.get(f"/api/v1/jobs/{id}").json()
    return view


def tarred(files: dict[str, bytes]) -> bytes:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return tar.getvalue()


ROWS = f'{{"prompt": "{SECRET} 2+2?", "answer": "4"}}\n{{"prompt": "{SECRET} 1+3?", "answer": "4"}}\n'.encode()


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    root = tmp_path_factory.mktemp("town")
    with ExitStack() as stack:
        service = stack.enter_context(served(root))
        worker = stack.enter_context(Listening.of(service))

        def client(key: str) -> httpx.Client:
            headers = {"Authorization": f"Bearer {key}"}
            return stack.enter_context(httpx.Client(base_url=service.url, headers=headers, timeout=PATIENCE))

        admin = client(service.key)
        keys, tenants = {}, {}
        for name in (f"ada-{SECRET}", "bob"):
            tenants[name] = admin.post("/api/v1/tenants", json={"name": name}).json()["id"]
            keys[name[:3]] = admin.post(f"/api/v1/tenants/{tenants[name]}/keys", json={"label": SECRET}).json()["key"]
        town = Town(root, service, worker, admin, client(keys["ada"]), client(keys["bob"]), keys)
        town.tenant = tenants[f"ada-{SECRET}"]
        town.dataset = town.ada.post("/api/v1/datasets", content=ROWS).json()["dataset"]
        town.adapter = town.ada.post("/api/v1/adapters", content=tarred(adapter_files(7.0))).json()["adapter"]
        environment = {"id": "jsonl", "dataset": town.dataset, "eval_dataset": town.dataset, "verifier": "exact"}
        wanted = job(name=SECRET, environment=environment, evaluation={"prompts": 2})
        made = town.ada.post("/api/v1/jobs", json=wanted, headers={"Idempotency-Key": "first"}).json()
        town.done = ended(town.ada, made["id"])
        assert town.done["state"] == "completed", town.done
        waiting = job(name=f"{SECRET}-2", environment={"hosted": "adas"})
        town.ada.put("/api/v1/secrets/mine", json={"value": SECRET}).raise_for_status()
        town.paused = town.ada.post("/api/v1/jobs", json=waiting).json()["id"]
        town.ada.post(f"/api/v1/jobs/{town.paused}/pause").raise_for_status()
        town.versions = town.ada.get(f"/api/v1/jobs/{town.done['id']}/policies/main/versions").json()
        yield town


# --- every route ------------------------------------------------------------------------------------------------------


def routes() -> list[tuple[str, str]]:
    """(method, path) of every route of the application, paths as ``/jobs/{job}``."""

    def walk(routes: Any) -> Iterator[tuple[str, str]]:
        for route in routes:
            router = getattr(route, "original_router", None)
            if router is not None:
                yield from walk(router.routes)
            elif route.path not in NOT_OURS:
                path = re.sub(r":\w+}", "}", route.path)
                yield from ((method, path) for method in getattr(route, "methods", None) or ["WEBSOCKET"])

    return sorted(walk(build(None).routes))  # type: ignore[arg-type]  # nothing is served by this one


def test_every_route_is_covered() -> None:
    found = routes()
    gc.collect()  # what tests before this one left is not this one's warning
    with warnings.catch_warnings(action="error"):  # such as two operations of one name
        documented = build(None).openapi()["paths"]  # type: ignore[arg-type]
    assert {path for _, path in found} >= documented.keys() - NOT_OURS
    without = {f"{method} {path}" for method, path in found if "{" not in path}
    assert without == WITHOUT_IDS.keys(), "a route without ids in its path needs a test, named in WITHOUT_IDS"
    assert all(test in globals() for test in WITHOUT_IDS.values())


@pytest.mark.parametrize(("method", "path"), [(m, p) for m, p in routes() if "{" in p])
def test_ids_of_another_tenant_answer_exactly_like_unknown_ones(town: Town, method: str, path: str) -> None:
    before = town.adas()
    none = "0" * 64
    nobodys = ids(
        f"job-{'0' * 24}", f"tenant-{'0' * 24}", none, none[: len(town.worker.uploads[-1])], none[:KEY_ID], "1" * 64
    )
    for id in (town.done["id"], town.paused):
        key = hash_key(town.keys["ada"])[:KEY_ID]
        theirs = ids(id, town.tenant, town.versions[-1]["hash"], town.worker.uploads[-1], key, town.dataset)
        for action in ("pause", "resume", "cancel") if "{action}" in path else ("",):
            answers = []
            for given in (theirs, nobodys):
                asked = ASKED.get(path, {}) if method == "POST" else None
                response = town.bob.request(method, path.format(**given, action=action), json=asked)
                told = response.text
                for name in NAMES:
                    told = told.replace(given[name], name)
                headers = {key: value for key, value in response.headers.items() if key not in ("date", "x-request-id")}
                answers.append((response.status_code, headers, told))
            assert answers[0] == answers[1]
            unopened = (401,) if path.startswith("/agents/") else (403, 404)  # those take the key of an episode alone
            if (method, path) == ("PUT", "/api/v1/secrets/{secret}"):
                unopened = (422,)  # of the missing text: names of secrets are each tenant's
            assert answers[0][0] in unopened, answers[0]
            assert SECRET not in answers[0][2]
    assert town.adas() == before


NAMES = ("job", "tenant", "digest", "ticket", "key", "upload")

ASKED = {
    "/openai/deployments/{deployment}/chat/completions": {"messages": [{"role": "user", "content": "2+2?"}]},
    "/openai/deployments/{deployment}/completions": {"prompt": "2+2?"},
}
"""Bodies of the routes that read one before they look for the object of their path."""


def ids(job: str, tenant: str, digest: str, ticket: str, key: str, upload: str) -> dict[str, str]:
    """The meaning of each parameter of a path. A parameter that is missing here is a new one: add its meaning."""
    return {
        "job": job,
        "tenant": tenant,
        "digest": digest,
        "ticket": ticket,
        "key": key,
        "upload": upload,
        "policy": "main",
        "version": "1",
        "name": "adapter_config.json",
        "model": f"{job}@1",
        "deployment": f"{job}@1",
        "path": f"jobs/{job}",
        "group": f"{job}-g0",
        "episode": f"{job}-g0-0",
        "file": "none.js",
        "file_id": f"file-{upload}",
        "tuning": f"ftjob-{job.removeprefix('job-')}",
        "link": "none",
        "secret": "mine",
    }


def test_lists_contain_only_the_tenants_objects(town: Town) -> None:
    hidden = [SECRET, town.done["id"], town.paused, town.tenant, town.dataset, town.adapter, town.keys["ada"]]
    hidden += [version["hash"] for version in town.versions]
    for route in WITHOUT_IDS:
        method, path = route.split(" ")
        if method == "GET":
            for client in (town.bob, httpx.Client(base_url=town.service.url, timeout=60)):
                text = client.get(path).text
                assert not [secret for secret in hidden if secret in text], route
    assert town.bob.get("/api/v1/jobs").json() == [] == town.bob.get("/api/v1/secrets").json()
    [secret] = town.ada.get("/api/v1/secrets").json()
    assert secret["name"] == "mine" and SECRET not in str(secret)
    town.bob.put("/api/v1/secrets/mine", json={"value": "his"}).raise_for_status()
    town.bob.delete("/api/v1/secrets/mine").raise_for_status()
    assert town.ada.get("/api/v1/secrets").json() == [secret]
    for path in (
        "/api/v1/workers",
        "/api/v1/workers/events",
        "/api/v1/workers/pools",
        "/api/v1/tenants",
        "/api/v1/costs",
    ):
        assert town.bob.get(path).status_code == 403
    assert town.bob.post("/api/v1/tenants", json={"name": "mallory"}).status_code == 403
    assert "mallory" not in town.admin.get("/api/v1/tenants").text
    assert town.keys["ada"] not in town.admin.get("/api/v1/tenants").text


def test_timeline_shows_the_work_of_others_without_a_name(town: Town) -> None:
    whole = {"start": 0}
    kinds = {}
    for name, client in (("admin", town.admin), ("ada", town.ada), ("bob", town.bob)):
        found = client.get("/api/v1/timeline", params=whole).json()
        kinds[name] = {span["kind"] for span in found["spans"]}
        assert found["start"] == 0 and 0 < found["oldest"] < found["end"]
        for path in ("/api/v1/timeline", "/api/v1/timeline/trace"):
            assert (town.done["id"] in client.get(path, params=whole).text) == (name != "bob")
            assert (town.tenant in client.get(path, params=whole).text) == (name != "bob")
    assert kinds["admin"] == kinds["ada"] >= {"prefill", "decode", "train", "environment", "transfer", "commit"}
    assert kinds["bob"] >= {"busy", "idle", "connected", "joined"}
    assert not kinds["bob"] & {"prefill", "decode", "train", "environment", "transfer", "commit"}
    [busy] = {span["worker"] for span in town.bob.get("/api/v1/timeline").json()["spans"] if span["kind"] == "busy"}
    assert busy == "scripted"
    of_job = town.admin.get(f"/api/v1/jobs/{town.done['id']}/timeline", params=whole).json()
    assert {span["job"] for span in of_job["spans"]} == {"", town.done["id"]}
    for query in ({"start": 5, "end": 4}, {"start": 4, "end": 4}):
        assert town.ada.get("/api/v1/timeline", params=query).status_code == 400
    for query in ({"start": "nan"}, {"end": "inf"}, {"end": 1e12}, {"columns": 0}, {"columns": 1e9}):
        assert town.ada.get("/api/v1/timeline", params=query).status_code == 422


def test_files_and_fine_tuning_jobs_are_their_owners(town: Town) -> None:
    assert f"file-{town.dataset}" in [file["id"] for file in town.ada.get("/v1/files").json()["data"]]
    assert town.bob.get("/v1/files").json()["data"] == town.bob.get("/v1/fine_tuning/jobs").json()["data"] == []
    asked = {"model": MODEL, "training_file": f"file-{town.dataset}"}
    refused = town.bob.post("/v1/fine_tuning/jobs", json=asked)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "training_file"
    sent = town.bob.post("/v1/files", data={"purpose": "fine-tune"}, files={"file": b"[1]"})
    assert sent.status_code == 400 and sent.json()["error"]["param"] == "file"
    grader = {"type": "string_check", "input": "{{item.a}}", "reference": "x", "operation": "eq"}
    assert town.bob.post("/v1/fine_tuning/alpha/graders/validate", json={"grader": grader}).status_code == 200
    tried = {"grader": grader, "model_sample": "", "item": {"a": "x"}}
    assert town.bob.post("/v1/fine_tuning/alpha/graders/run", json=tried).json()["reward"] == 1


def test_a_cookie_opens_the_routes_of_its_key(town: Town) -> None:
    """Signed in, a browser sees its tenant's jobs; nobody signs in for another."""
    page = {"X-Rookery-Page": "1"}
    for client, jobs in ((town.ada, {town.done["id"], town.paused}), (town.bob, set())):
        with httpx.Client(base_url=town.service.url, headers=page, timeout=60) as browser:
            assert browser.post("/api/v1/sign-in").status_code == 401
            assert browser.post("/api/v1/sign-out").status_code == 401
            assert browser.post("/api/v1/sign-in/links").status_code == 401
            link = client.post("/api/v1/sign-in/links").json()["path"].rpartition("/")[2]
            assert browser.post(f"/api/v1/sign-in/links/{link}").status_code == 204
            assert {run["id"] for run in browser.get("/api/v1/runs").json()["runs"]} == jobs
            assert browser.get("/api/v1/workers").status_code == 403
    assert town.done["id"] in town.admin.get("/api/v1/runs").text, "the administrator sees all"
    assert town.admin.get(f"/api/v1/jobs/{town.done['id']}").json()["name"] == SECRET
    assert town.bob.get("/api/v1/runs", params={"id": town.done["id"], "text": SECRET}).json()["total"] == 0


def test_revoked_key_is_refused_and_other_keys_still_work(town: Town) -> None:
    keys = f"/api/v1/tenants/{town.tenant}/keys"
    made = town.admin.post(keys, json={"label": "lost"}).json()["key"]
    (row,) = [row for row in town.admin.get(keys).json() if row["label"] == "lost"]
    assert row["revoked"] is None and row["created"] > 0
    assert made not in town.admin.get(keys).text and hash_key(made) not in town.admin.get(keys).text
    lost = httpx.Client(base_url=town.service.url, headers={"X-API-Key": made}, timeout=60)
    assert lost.get("/api/v1/jobs").json() == town.ada.get("/api/v1/jobs").json()
    for client in (lost, town.ada, town.bob):
        assert client.delete(f"{keys}/{row['id']}").status_code == 403
    gone = town.admin.delete(f"{keys}/{row['id']}")
    assert gone.status_code == 200 and gone.json()["revoked"] >= row["created"]
    assert lost.get("/api/v1/jobs").status_code == 401
    assert lost.get("/v1/models").status_code == 401
    assert town.ada.get("/api/v1/jobs").status_code == 200
    assert town.admin.delete(f"{keys}/{row['id']}").status_code == 409, "it is revoked already"
    bobs = [row["id"] for row in town.admin.get("/api/v1/tenants").json() if row["name"] == "bob"]
    assert town.admin.delete(f"/api/v1/tenants/{bobs[0]}/keys/{row['id']}").status_code == 404
    own = hash_key(town.service.key)[:KEY_ID]
    admins = [row["id"] for row in town.admin.get("/api/v1/tenants").json() if row["name"] == "admin"]
    refused = town.admin.delete(f"/api/v1/tenants/{admins[0]}/keys/{own}")
    assert refused.status_code == 409 and "made with that key" in refused.text
    assert town.admin.get("/api/v1/tenants").status_code == 200


@pytest.mark.parametrize("lifetime", [None, 7.0], ids=["revoked", "expired"])
def test_a_key_that_ends_cuts_its_open_connections_and_no_other(town: Town, lifetime: float | None) -> None:
    """A stream, a host that was welcomed, and one that has sent nothing yet. The key outlives their start, and ends
    before hosts that send no heartbeats are cut for that."""
    path, socket_url = f"/api/v1/tenants/{town.tenant}/keys", f"{town.service.url.replace('http', 'ws', 1)}/wire/host"
    ends = f"stolen {lifetime}"
    made = ({"label": ends, "lifetime_seconds": lifetime}, {"label": "own", "lifetime_seconds": 1e6})
    stolen, own = (town.admin.post(path, json=about).json()["key"] for about in made)
    keys = {"stolen": stolen, "own": own}
    with ExitStack() as opened:
        lines, hosts, silent = {}, {}, {}
        for label, key in keys.items():
            headers = {"Authorization": f"Bearer {key}"}
            client = opened.enter_context(httpx.Client(base_url=town.service.url, headers=headers, timeout=PATIENCE))
            stream = client.stream("GET", f"/api/v1/jobs/{town.paused}/metrics/stream")
            lines[label] = opened.enter_context(stream).iter_lines()
            assert next(lines[label])
            hosts[label], silent[label] = (
                opened.enter_context(connect(socket_url, additional_headers=headers)) for _ in range(2)
            )
            hosts[label].send(host_hello())
            hosts[label].recv(timeout=PATIENCE)
        (row,) = [row for row in town.admin.get(path).json() if row["label"] == ends]
        if lifetime is None:
            town.admin.delete(f"{path}/{row['id']}").raise_for_status()
        with pytest.raises(httpx.TransportError):
            deque(lines["stolen"], 0)
        for socket in (hosts["stolen"], silent["stolen"]):
            with pytest.raises(ConnectionClosed):
                while True:
                    socket.recv(timeout=PATIENCE)
        assert next(lines["own"]) is not None
        for socket in (hosts["own"], silent["own"]):
            assert socket.ping().wait(PATIENCE)


def test_start_with_a_revoked_admin_key_is_refused(tmp_path: Path) -> None:
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        other = Client(service.url, client.add_key("admin").key)
        other.revoke_key("admin", hash_key(service.key)[:KEY_ID])
        rows = other.keys("admin")
        assert [row.id for row in rows if row.revoked] == [hash_key(service.key)[:KEY_ID]]
        kept = [("", "admin", False), ("admin.key", "admin", True), ("worker.token", "worker", False)]
        assert sorted((row.label, row.role, bool(row.revoked)) for row in rows) == kept
        other.close()
    with pytest.raises(UserError, match=r"the key in admin\.key was revoked"), served(tmp_path):
        pass
    (tmp_path / "data" / "admin.key").unlink()
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        rows = client.keys("admin")
        assert [row.id for row in rows if row.revoked] != [hash_key(service.key)[:KEY_ID]], "the key is a new one"
        found = sorted((row.label, row.role, bool(row.revoked)) for row in rows)
        assert found == sorted([*kept, ("admin.key", "admin", False)])


# --- ids inside bodies ------------------------------------------------------------------------------------------------


def same(town: Town, path: str, theirs: dict[str, Any], nobodys: dict[str, Any], names: dict[str, str]) -> None:
    """Both requests are refused in the same words. ``names`` maps what Ada's is called to what nobody's is."""
    answers = []
    for body in (theirs, nobodys):
        response = town.bob.post(path, json=body)
        assert 400 <= response.status_code < 500, response.text
        text = response.text
        for mine, none in names.items():
            text = text.replace(mine, "X").replace(none, "X")
        answers.append((response.status_code, text))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/jobs/dry-run"])
def test_job_cannot_name_another_tenants_objects(town: Town, path: str) -> None:
    before = town.adas()
    none, nobody = "0" * 64, f"job-{'0' * 24}"
    hashes = [town.dataset, town.adapter, *(version["hash"] for version in town.versions)]
    for digest in hashes:  # also under the wrong field: an adapter is no dataset, a version no upload
        for name in ("dataset", "eval_dataset"):
            made = [
                {**job()["environment"], **({"rows": None} if name == "dataset" else {}), name: value}
                for value in (digest, none)
            ]
            made = [{key: value for key, value in one.items() if value is not None} for one in made]
            same(town, path, job(environment=made[0]), job(environment=made[1]), {digest: none})
        starts = [{"main": {"rank": 4, "targets": ["q"], "warm_start": {"upload": value}}} for value in (digest, none)]
        same(town, path, job(policies=starts[0]), job(policies=starts[1]), {digest: none})
    for id in (town.done["id"], town.paused):
        for more in ({}, {"version": 1}, {"version": 99}, {"policy": "other"}):
            starts = [
                {"main": {"rank": 4, "targets": ["q"], "warm_start": {"job": value, **more}}} for value in (id, nobody)
            ]
            same(town, path, job(policies=starts[0]), job(policies=starts[1]), {id: nobody})
    assert town.bob.get("/api/v1/jobs").json() == []
    assert town.adas() == before


def test_another_tenants_policies_cannot_be_sampled(town: Town) -> None:
    nobody = f"job-{'0' * 24}"
    asked = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4}
    for id in (town.done["id"], town.paused):
        for version in ("", "@0", "@1", "@2", "@99", "@latest", "@x", "@"):
            targets = [f"{value}{version}" for value in (id, nobody)]
            theirs, nobodys = ({**asked, "target": target} for target in targets)
            same(town, "/api/v1/sample", theirs, nobodys, {id: nobody})
            theirs, nobodys = ({**asked, "model": target} for target in targets)
            same(town, "/v1/chat/completions", theirs, nobodys, {id: nobody})
            theirs, nobodys = ({"prompt": "2+2?", "model": target} for target in targets)
            same(town, "/v1/completions", theirs, nobodys, {id: nobody})
            theirs, nobodys = ({"input": "2+2?", "model": target} for target in targets)
            same(town, "/v1/responses", theirs, nobodys, {id: nobody})
            same(town, "/v1/responses/input_tokens", theirs, nobodys, {id: nobody})
            theirs, nobodys = ({"token_ids": [1, 2], "model": target} for target in targets)
            same(town, "/inference/v1/generate", theirs, nobodys, {id: nobody})
            same(town, "/v1/embeddings", theirs, nobodys, {id: nobody})
    for name in (town.versions[-1]["hash"], town.done["policies"][0]["id"], town.adapter, SECRET):
        assert town.bob.post("/api/v1/sample", json={**asked, "target": name}).status_code == 404


def test_hash_is_not_a_permission(town: Town) -> None:
    """A tenant that uploads the same bytes may read them, and only from then on."""
    environment = {"id": "jsonl", "dataset": town.dataset, "verifier": "exact"}
    wanted = job(name="same-bytes", environment=environment, stop={"steps": 1})
    assert town.bob.post("/api/v1/jobs", json=wanted).status_code == 422
    assert town.bob.post("/api/v1/datasets", content=ROWS).json()["dataset"] == town.dataset
    made = town.bob.post("/api/v1/jobs", json=wanted).json()
    assert ended(town.bob, made["id"])["state"] == "completed"
    start = {"main": {"rank": 4, "targets": ["q"], "warm_start": {"upload": town.adapter}}}
    wanted = job(name="same-adapter", policies=start, stop={"steps": 1})
    assert town.bob.post("/api/v1/jobs", json=wanted).status_code == 422
    brought = town.bob.post("/api/v1/adapters", content=tarred(adapter_files(7.0))).json()["adapter"]
    assert brought == town.adapter
    made = town.bob.post("/api/v1/jobs", json=wanted).json()
    assert ended(town.bob, made["id"])["state"] == "completed"
    for view in town.bob.get("/api/v1/jobs").json():  # what Bob leaves, he leaves alone
        assert town.ada.get(f"/api/v1/jobs/{view['id']}").status_code == 404
    assert {view["id"] for view in town.ada.get("/api/v1/jobs").json()} == {town.done["id"], town.paused}


def test_idempotency_keys_are_scoped_by_tenant(town: Town) -> None:
    """The same key of another tenant makes another job, and tells nothing of the first."""
    headers = {"Idempotency-Key": "first"}
    made = town.bob.post("/api/v1/jobs", json=job(name="bobs", stop={"steps": 1}), headers=headers)
    assert made.status_code == 201 and made.json()["id"] != town.done["id"] and SECRET not in made.text
    again = town.ada.post("/api/v1/jobs", json=town.done["spec"], headers=headers)
    assert (again.status_code, again.json()["id"]) == (200, town.done["id"])
    assert ended(town.bob, made.json()["id"])["state"] == "completed"


# --- environment hosts ------------------------------------------------------------------------------------------------


class Recording(rookery.Environment):
    """Keeps what it was asked and told."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.received: list[str] = []
        self.lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Recording:
        made = Recording(self.word)
        made.received, made.lock = self.received, self.lock
        return made

    def prompts(self, split: str) -> list[str]:
        with self.lock:
            self.received.append(f"{self.word} prompts {split}")
        return [f"{self.word} {number}" for number in range(4)]

    def reset(self, prompt: str, seed: int) -> list[dict[str, str]]:
        with self.lock:
            self.received.append(f"{self.word} reset {prompt}")
        return [{"role": "user", "content": prompt}]

    def step(self, reply: rookery.Reply) -> rookery.Step:
        with self.lock:
            self.received.append(f"{self.word} step {reply.messages[0]['content']}")
        return rookery.Step(reward=float(reply.text == "4"), done=True)


def test_hosts_with_one_name_get_episodes_of_their_tenant_only(town: Town) -> None:
    parts: dict[str, Any] = {
        "policies": {"main": {"rank": 4, "targets": ["q"]}},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "stop": {"steps": 3},
    }
    bobs, adas = Recording("bob"), Recording(SECRET)
    with (
        rookery.Client(town.service.url, town.keys["bob"]) as bob,
        rookery.Client(town.service.url, town.keys["ada"]) as ada,
    ):
        jobs = [bob.train(base_model=MODEL, environment=bobs, name="shared", **parts)]
        # Ada's job of that environment waits while only Bob offers it
        waiting = {"name": "early", "base_model": MODEL, "environment": {"hosted": "shared", "return_timeout": 0.5}}
        early = ada.submit({**waiting, **parts})
        assert jobs[0].wait(PATIENCE).state == "completed"
        paused = next(view for kind, view in early.follow() if kind == "job" and view.state == "paused")
        assert "no environment host offers 'shared'" in paused.reason
        jobs.append(ada.train(base_model=MODEL, environment=adas, name="shared", **parts))
        jobs.append(bob.train(base_model=MODEL, environment=bobs, name="shared", **parts))
        assert [job.wait(PATIENCE).state for job in jobs] == ["completed"] * 3
        early.cancel()
    assert {line.split()[0] for line in bobs.received} == {"bob"}
    assert {line.split()[0] for line in adas.received} == {SECRET}
    assert not [line for line in bobs.received if SECRET in line] and not [
        line for line in adas.received if "bob" in line
    ]


# --- sockets and tickets ----------------------------------------------------------------------------------------------


def greeted(town: Town, path: str, token: str, frame: bytes) -> Any:
    """The answer of the service to a first frame; None where it closes the connection."""
    headers = {"Authorization": f"Bearer {token}"}
    with connect(town.service.url.replace("http", "ws", 1) + path, additional_headers=headers) as socket:
        socket.send(frame)
        for answer in socket:
            return protocol.decode(protocol.to_worker if path.endswith("worker") else protocol.to_host, bytes(answer))
    return None


def host_hello(environment: str = "adas", episodes: list[str] | None = None) -> bytes:
    offers = [protocol.HostedEnvironment(name=environment)]
    return protocol.encode(
        protocol.HostHello(
            protocol=protocol.PROTOCOL, instance=f"thief-{uuid.uuid4()}", environments=offers, episodes=episodes or []
        )
    )


def refusal(town: Town, path: str, token: str) -> tuple[int, str]:
    """Status and reason of a connection that is refused before any frame."""
    with pytest.raises(InvalidStatus) as refused:
        greeted(town, path, token, b"")
    assert refused.value.response.body is not None
    return refused.value.response.status_code, json.loads(refused.value.response.body)["error"]


def test_each_role_of_a_key_opens_its_routes(town: Town) -> None:
    def new(tenant: str, **wanted: Any) -> httpx.Response:
        return town.admin.post(f"/api/v1/tenants/{tenant}/keys", json=wanted)

    tenants = {row["name"][:5]: row["id"] for row in town.admin.get("/api/v1/tenants").json()}
    host = new(tenants["bob"], role="host").json()["key"]
    guest = new(tenants["admin"], role="tenant").json()["key"]
    for role in ("worker", "admin"):
        refused = new(tenants["bob"], role=role)
        assert refused.status_code == 400 and "administrator" in refused.json()["error"]
    for key, paths in {
        town.token: ("/wire/host",), host: ("/wire/host",), guest: ("/wire/host", "/api/v1/jobs", "/v1/models"),
        town.keys["bob"]: ("/wire/host", "/api/v1/jobs", "/v1/models"),
        town.service.key: ("/wire/host", "/api/v1/jobs", "/v1/models", "/api/v1/tenants"),
    }.items():  # fmt: skip
        for path in ("/wire/worker", "/wire/host"):
            if path in paths:
                assert isinstance(greeted(town, path, key, host_hello()), protocol.HostWelcome)
            elif key != town.token:
                assert refusal(town, path, key)[0] == 403
        for path in ("/api/v1/jobs", "/v1/models", "/api/v1/tenants"):
            for headers in ({"Authorization": f"Bearer {key}"}, {"X-API-Key": key}):
                answer = httpx.get(town.service.url + path, headers=headers, timeout=60)
                assert answer.status_code == (200 if path in paths else 403), (path, answer.text)
    for wrong in ("", "wrong", town.token[:-1], town.keys["bob"][:-1]):
        for path in ("/wire/worker", "/wire/host"):
            assert refusal(town, path, wrong) == (401, UNKNOWN_KEY if wrong else NO_KEY)
    assert [worker["name"] for worker in town.admin.get("/api/v1/workers").json()] == ["scripted"]
    events = town.admin.get("/api/v1/workers/events").json()
    assert {(event["worker"], event["event"]) for event in events} >= {("scripted", "joined"), ("scripted", "ready")}
    last = {"after": events[-1]["number"]}
    assert town.admin.get("/api/v1/workers/events", params=last).json() == []
    first = town.admin.get("/api/v1/workers/events", params={"after": 0, "limit": 1}).json()
    newest = town.admin.get("/api/v1/workers/events", params={"limit": 1}).json()
    assert len(newest) == 1 and first == events[:1] and newest[0]["number"] >= events[-1]["number"] > first[0]["number"]
    assert town.admin.get("/api/v1/workers/events", params={"limit": 0}).status_code == 422
    answer = greeted(town, "/wire/host", host, host_hello("builtin:jsonl"))
    assert isinstance(answer, protocol.HelloRejected) and "belong to the service" in answer.reason


def test_key_expires(town: Town) -> None:
    made = town.admin.post(f"/api/v1/tenants/{town.tenant}/keys", json={"lifetime_seconds": 0.5}).json()

    def refused() -> httpx.Response | None:
        answer = httpx.get(f"{town.service.url}/api/v1/jobs", headers={"X-API-Key": made["key"]}, timeout=60)
        return None if answer.is_success else answer

    answer = until(refused)
    assert answer is not None
    assert answer.status_code == 401 and time.time() >= made["expires"]
    assert re.fullmatch(r"the API key expired on [0-9: -]+ UTC; ask the administrator .*", answer.json()["error"])


def test_a_formerly_valid_key_gets_the_reason_and_an_unknown_one_does_not(town: Town) -> None:
    path = f"/api/v1/tenants/{town.tenant}/keys"
    made = town.admin.post(path, json={"label": "old laptop"}).json()
    (row,) = [row for row in town.admin.get(path).json() if row["label"] == "old laptop"]
    town.admin.delete(f"{path}/{row['id']}").raise_for_status()
    for key, said in ((made["key"], "the API key 'old laptop' was revoked on "), (made["key"] + "x", UNKNOWN_KEY)):
        answer = httpx.get(f"{town.service.url}/api/v1/jobs", headers={"X-API-Key": key}, timeout=60)
        assert answer.status_code == 401 and answer.json()["error"].startswith(said)
    assert httpx.get(f"{town.service.url}/api/v1/jobs", timeout=60).json()["error"] == NO_KEY


def test_hello_of_a_host_does_not_reveal_which_episodes_exist(town: Town) -> None:
    """It is sent a close for every episode that is not of its tenant's unfinished jobs, whether or not there is one."""
    asked = [f"{town.paused}-0-0", f"{town.done['id']}-0-0", f"job-{'0' * 24}-0-0"]
    url, headers = town.service.url.replace("http", "ws", 1), {"Authorization": f"Bearer {town.keys['bob']}"}
    with connect(f"{url}/wire/host", additional_headers=headers) as socket:
        socket.send(host_hello(episodes=asked))
        answers = [protocol.decode(protocol.to_host, bytes(socket.recv(timeout=30))) for _ in range(4)]
    assert [getattr(answer, "episode", "") for answer in answers] == ["", *asked]


@pytest.mark.parametrize("path", ["/wire/worker", "/wire/host"])
@pytest.mark.parametrize("frame", [b"", b"\xff\xff", protocol.encode(protocol.Draining(epoch=1)), b'{"token": ""}'])
def test_peer_without_hello_gets_no_information(town: Town, path: str, frame: bytes) -> None:
    answer = greeted(town, path, town.token, frame)
    assert answer is None or isinstance(answer, protocol.HelloRejected)
    assert town.bob.get("/api/v1/health").status_code == 200


def test_artifacts_are_read_with_a_worker_s_signature_only(town: Town) -> None:
    asked = {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4, "seed": 1}
    for version in (1, 2):
        town.ada.post("/api/v1/sample", json={**asked, "target": f"{town.done['id']}@{version}"}).raise_for_status()
    first, second = town.versions[1]["hash"], town.versions[2]["hash"]
    key, now = town.worker.reads, time.time()

    def read(digest: str, signature: str, name: str = "/adapter_model.safetensors") -> httpx.Response:
        headers = {protocol.READ_HEADER: signature.encode()}
        return httpx.get(f"{town.service.url}/wire/artifacts/{digest}{name}", headers=headers, timeout=60)

    def signed(digest: str, at: float = now, key: protocol.ReadKey = key) -> str:
        return protocol.sign_read(key, digest, at)

    assert read(first, signed(first)).content == adapter_files(1.0)["adapter_model.safetensors"]
    assert read(first, signed(first, now + 60)).status_code == 200, "clocks drift"
    unknown = read(first, "")
    assert unknown.status_code == 404
    id, minute, signature = signed(first).split(".")
    bobs = protocol.read_key(hash_key(town.keys["bob"]))
    forged = [
        signed(second), signed(first, now - 600), signed(first, now + 600), signed(first, key=bobs),
        signed(first, key=protocol.ReadKey(id=key.id, secret=bobs.secret)), f"{id}.{int(minute) + 1}.{signature}",
        f"{id}.{minute}.{signature[::-1]}", signature, f"{id}.{minute}.", f"{id}..{signature}",
        f".{minute}.{signature}", f"{id}.é.{signature}", f"{id}.²{minute}.{signature}",
        f"{id}.{'9' * 5000}.{signature}", "..", "é.é.é",
    ]  # fmt: skip
    for forgery in forged:
        for name in ("", "/adapter_model.safetensors", "/trainer_state.safetensors"):
            answer = read(first, forgery, name)
            assert (answer.status_code, answer.content) == (404, unknown.content), forgery
    for name in ("/manifest.json", "/../manifest.json", "/%2e%2e%2f%2e%2e%2fadmin.key", "/.staging"):
        assert read(first, signed(first), name).status_code == 404
    for digest in (first.upper(), first[:-1], f"{first}0", "..", ".staging"):
        assert read(digest, signed(first)).status_code == 404
    for text in (town.ada, town.bob):
        headers = {**dict(text.headers), protocol.READ_HEADER: ""}
        assert httpx.get(f"{town.service.url}/wire/artifacts/{first}", headers=headers, timeout=60).status_code == 404
    for path in (f"/wire/uploads/{town.worker.uploads[-1]}/adapter_config.json", "/wire/uploads/x/adapter_config.json"):
        assert httpx.put(town.service.url + path, content=b"{}", timeout=60).status_code == 404, (
            "an upload that is over"
        )


def test_paths_on_the_service_reveal_nothing_to_a_tenant(town: Town, tmp_path: Path) -> None:
    """A folder that is there and one that is not are refused in the same words; so are files of other people."""
    (tmp_path / "here").mkdir()
    here, gone = str(tmp_path / "here"), str(tmp_path / "gone")
    same(town, "/api/v1/jobs", job(base_model=here), job(base_model=gone), {here: gone})
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    names = {str(tmp_path / "rows.jsonl"): str(tmp_path / "none.jsonl")}
    for key in ("path", "eval_path"):
        made = [{"id": "jsonl", "verifier": "exact", key: value} for pair in names.items() for value in pair]
        same(town, "/api/v1/jobs", job(environment=made[0]), job(environment=made[1]), names)
    starts = [{"main": {"warm_start": {"peft": value}}} for value in (here, gone)]
    same(town, "/api/v1/jobs", job(policies=starts[0]), job(policies=starts[1]), {here: gone})
