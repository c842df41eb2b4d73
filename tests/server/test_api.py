"""The HTTP API over real sockets: jobs from submit to adapter, refusals, owners, tickets, streams."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import math
import re
import socket
import stat
import tarfile
import threading
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.faces import MODEL, ThreadedWorker, adapter_files, job, served
from tests.support.libraries import installed
from tests.support.waiting import until

from rookery.controller import episode_views, views
from rookery.errors import UserError
from rookery.protocol.gauges import GAUGES, Gauge
from rookery.server import schemas
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings


@dataclass
class Faces:
    """A service with a scripted worker, the administrator, and two tenants; a job of the first has completed."""

    root: Path
    service: EmbeddedService
    admin: httpx.Client
    ada: httpx.Client
    bob: httpx.Client
    done: dict[str, Any]
    worker: ThreadedWorker


def end_of(client: httpx.Client, id: str) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Follows a job's stream to its end: all events, and the job then."""
    events = []
    with client.stream("GET", f"/api/v1/jobs/{id}/metrics/stream", timeout=60) as response:
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                events.append((kind, json.loads(line.removeprefix("data: "))))
    assert events[-1][0] == "end"
    return events, events[-1][1]


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    root = tmp_path_factory.mktemp("faces")
    with served(root, failed_keys_per_minute=1000) as service:

        def client(key: str) -> httpx.Client:
            return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

        with client(service.key) as admin, ThreadedWorker.of(service) as worker:
            keys = []
            for name in ("ada", "bob"):
                tenant = admin.post("/api/v1/tenants", json={"name": name}).json()
                keys.append(admin.post(f"/api/v1/tenants/{tenant['id']}/keys", json={"label": "test"}).json()["key"])
            with client(keys[0]) as ada, client(keys[1]) as bob:
                submitted = ada.post("/api/v1/jobs", json=job(), headers={"Idempotency-Key": "first"})
                assert submitted.status_code == 201, submitted.text
                _, done = end_of(ada, submitted.json()["id"])
                assert done["state"] == "completed", done
                yield Faces(root, service, admin, ada, bob, done, worker)


def refused(response: httpx.Response, status: int) -> str:
    """The one line of a refusal."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert isinstance(error, str) and error and "\n" not in error and "Traceback" not in error
    return error


# --- a job and what it leaves -----------------------------------------------------------------------------------------


def test_job_runs_to_its_end_and_shows_its_results(faces: Faces) -> None:
    assert faces.done["step"] == 2 and faces.done["steps"] == 2 and faces.done["tenant"] == "ada"
    rows = faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/metrics").json()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["reward"] <= 1 for row in rows)
    later = faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/metrics", params={"after": 1}).json()
    assert later == rows[1:]
    kinds = {event["kind"] for event in faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/events").json()}
    assert "state" in kinds
    assert [view["id"] for view in faces.ada.get("/api/v1/jobs").json()] == [faces.done["id"]]


def test_stream_sends_every_row_and_the_end_also_to_late_readers(faces: Faces) -> None:
    events, view = end_of(faces.ada, faces.done["id"])
    assert [data["step"] for kind, data in events if kind == "metrics"] == [1, 2]
    assert view["state"] == "completed"
    headers = {"Last-Event-ID": "1"}
    text = faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/metrics/stream", headers=headers).text
    assert "id: 2\nevent: metrics" in text and "id: 1\n" not in text


def test_same_idempotency_key_returns_the_same_job(faces: Faces) -> None:
    again = faces.ada.post("/api/v1/jobs", json=job(), headers={"Idempotency-Key": "first"})
    assert again.status_code == 200 and again.json()["id"] == faces.done["id"]
    other = faces.ada.post("/api/v1/jobs", json=job(name="other"), headers={"Idempotency-Key": "first"})
    assert "first" in refused(other, 409)


def test_trajectories_have_tokens_logprobs_and_versions(faces: Faces) -> None:
    rows = faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/trajectories", params={"limit": 3}).json()
    assert len(rows) == 3
    trajectory = rows[0]["trajectories"][0]
    assert len(trajectory["tokens"]) == len(trajectory["logprobs"]) == len(trajectory["versions"])
    assert rows[0]["reward"] in (0.0, 1.0)
    assert "limit" in refused(faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/trajectories?limit=0"), 422)


def test_adapter_download_has_no_trainer_state(faces: Faces) -> None:
    path = f"/api/v1/jobs/{faces.done['id']}/policies/main/versions"
    assert [row["version"] for row in faces.ada.get(path).json()] == [0, 1, 2]
    response = faces.ada.get(f"{path}/latest/adapter")
    assert int(response.headers["content-length"]) == len(response.content)
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    assert found == adapter_files(2.0)
    assert faces.ada.get(f"{path}/1/adapter").status_code == 200
    refused(faces.ada.get(f"{path}/99/adapter"), 404)
    refused(faces.ada.get(f"{path}/newest/adapter"), 404)


def test_policy_and_base_model_can_be_sampled(faces: Faces) -> None:
    asked = {"messages": [{"role": "user", "content": "2+2?"}], "seed": 4, "max_tokens": 20, "temperature": 0}
    for target, version in ((MODEL, 0), (faces.done["id"], 2), (f"{faces.done['id']}@1", 1)):
        reply = faces.ada.post("/api/v1/sample", json={"target": target, **asked}).json()
        assert reply["text"] == "4" and reply["version"] == version, reply
        assert len(reply["tokens"]) == len(reply["logprobs"]) == 2
    refused(faces.ada.post("/api/v1/sample", json={"target": "nobody", **asked}), 404)
    unclear = {"target": f"{faces.done['id']}@x", **asked}
    assert "after the @ comes a version's number" in refused(faces.ada.post("/api/v1/sample", json=unclear), 400)
    assert "messages" in refused(faces.ada.post("/api/v1/sample", json={"target": MODEL, "messages": []}), 422)
    long = {**asked, "messages": [{"role": "user", "content": "x" * 600}]}
    assert "context" in refused(faces.ada.post("/api/v1/sample", json={"target": MODEL, **long}), 400)


def test_pause_resume_and_cancel(faces: Faces) -> None:
    waiting = job(name="waiting", environment={"hosted": "nobody-offers-this"})
    id = faces.bob.post("/api/v1/jobs", json=waiting).json()["id"]
    assert faces.bob.post(f"/api/v1/jobs/{id}/pause").json()["state"] == "paused"
    assert faces.bob.post(f"/api/v1/jobs/{id}/resume").json()["state"] in ("queued", "running")
    view = faces.bob.post(f"/api/v1/jobs/{id}/cancel").json()
    assert view["state"] == "cancelled" and view["finished"] > 0
    assert end_of(faces.bob, id)[1]["state"] == "cancelled"
    refused(faces.bob.post(f"/api/v1/jobs/{id}/resume"), 409)
    refused(faces.bob.post(f"/api/v1/jobs/{id}/explode"), 422)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model": "no-such-model"}, "base_model"),
        ({"algorithm": {"groupsize": 8}}, "algorithm.groupsize"),
        ({"stop": {}}, "at least one of steps"),
        ({"environment": {"id": "jsonl", "rows": [{"prompt": "?", "answer": "!"}], "verifier": "magic"}}, "verifier"),
        ({"environment": {"id": "jsonll", "path": "sums.jsonl", "verifier": "exact"}}, "did you mean jsonl?"),
        ({"environment": {"id": "jsonl", "path": "/etc/passwd", "verifier": "exact"}}, "upload"),
        ({"environment": {"id": "jsonl", "dataset": "0" * 64, "verifier": "exact"}}, "dataset"),
        ({"environment": {"hosted": "x", "seed": 2**64}}, "environment.seed"),
        ({"policies": {"main": {"warm_start": {"peft": "/home/ada/adapter"}}}}, "upload"),
        ({"policies": {"main": {"warm_start": {"upload": "0" * 64}}}}, "warm_start"),
        ({"policies": {"main": {"rank": 400}}}, "policies.main.rank"),
    ],
)
def test_wrong_job_is_refused_with_reasons_and_not_created(faces: Faces, change: dict[str, Any], said: str) -> None:
    before = len(faces.ada.get("/api/v1/jobs").json())
    for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run"):
        response = faces.ada.post(path, json=job(**change))
        assert 400 <= response.status_code < 500, response.text
        assert said in response.text
        refused(response, response.status_code)
    assert len(faces.ada.get("/api/v1/jobs").json()) == before


def test_library_environment_is_created_by_its_host_not_by_the_service(faces: Faces, tmp_path: Path) -> None:
    """The service runs in this process, its checks and its host in others, which may or may not have the library."""
    with installed(tmp_path, "reasoning_gym", "raise AssertionError('run in the service')"):
        absent = job(environment={"id": "reasoning-gym", "task": "absent"})
        line = refused(faces.ada.post("/api/v1/jobs/dry-run", json=absent), 422)
        assert "reasoning-gym: not installed" in line or line.startswith("prompts('train'): ")
        wrong = job(environment={"id": "reasoning-gym", "task": "absent", "size": 0})
        assert "environment.size" in refused(faces.ada.post("/api/v1/jobs", json=wrong), 422)


def test_dry_run_shows_the_whole_job_and_three_prompts(faces: Faces) -> None:
    before = len(faces.ada.get("/api/v1/jobs").json())
    plan = faces.ada.post("/api/v1/jobs/dry-run", json=job()).json()
    assert plan["spec"]["algorithm"]["loss"]["name"] == "aipo" and len(plan["prompts"]) == 3
    assert "<|im_start|>assistant" in plan["prompts"][0]["text"]
    assert plan["constants"] == {"main": {"reply": "4", "reward": 1, "prompts": 6}}
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate("aabac")]
    environment = {"id": "jsonl", "rows": rows, "eval_last": 4, "verifier": "exact"}
    plan = faces.ada.post("/api/v1/jobs/dry-run", json=job(environment=environment, evaluation={"prompts": 3})).json()
    assert plan["constants"] == {"main": {"reply": "a", "reward": pytest.approx(2 / 3), "prompts": 3}}
    assert len(faces.ada.get("/api/v1/jobs").json()) == before


def test_dry_run_warns_where_no_reply_fits_the_context(faces: Faces) -> None:
    environment = {"id": "jsonl", "rows": [{"prompt": "far " * 3000, "answer": 1}, {"prompt": "1+1?", "answer": 2}]}
    environment["verifier"] = "number"
    plan = faces.ada.post("/api/v1/jobs/dry-run", json=job(environment=environment)).json()
    assert any("2 of the first 3 prompts leave no room for a reply" in warning for warning in plan["warnings"])


def test_all_errors_have_the_same_format(faces: Faces) -> None:
    refused(faces.ada.get("/api/v1/nothing"), 404)
    refused(faces.admin.post("/api/v1/tenants/nobody/keys", json={}), 404)
    wrong_method = faces.ada.delete("/api/v1/jobs")
    refused(wrong_method, 405)
    assert wrong_method.headers["allow"] == "GET, POST"
    refused(faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/metrics?after=x"), 422)


def test_job_is_deleted_with_its_artifacts_once_it_has_ended(faces: Faces) -> None:
    made = faces.ada.post("/api/v1/jobs", json=job(name="short-lived")).json()
    _, view = end_of(faces.ada, made["id"])
    path = f"/api/v1/jobs/{view['id']}"
    hashes = {row["hash"] for row in faces.ada.get(f"{path}/policies/main/versions").json()}
    stored = faces.root / "data" / "artifacts"
    assert hashes <= {folder.name for folder in stored.rglob("*")}
    other = {row["hash"] for row in faces.ada.get(f"/api/v1/jobs/{faces.done['id']}/policies/main/versions").json()}
    assert hashes - other, "all jobs begin with the same version 0"
    waiting = faces.ada.post("/api/v1/jobs", json=job(environment={"hosted": "nobody"})).json()["id"]
    assert f"rookery jobs cancel {waiting}" in refused(faces.ada.delete(f"/api/v1/jobs/{waiting}"), 409)
    faces.ada.post(f"/api/v1/jobs/{waiting}/pause").raise_for_status()
    refused(faces.ada.delete(f"/api/v1/jobs/{waiting}"), 409)
    faces.ada.post(f"/api/v1/jobs/{waiting}/cancel").raise_for_status()
    assert faces.ada.delete(f"/api/v1/jobs/{waiting}").json()["state"] == "cancelled"

    refused(faces.bob.delete(path), 404)
    assert faces.ada.delete(path).json() == view
    assert hashes & {folder.name for folder in stored.rglob("*")} == hashes & other
    assert not (faces.root / "data" / "jobs" / view["id"]).exists()
    for missing in ("", "/metrics", "/events", "/policies/main/versions/latest/adapter"):
        refused(faces.ada.get(f"{path}{missing}"), 404)
    refused(faces.ada.delete(path), 404)
    assert [row["id"] for row in faces.ada.get("/api/v1/jobs").json()][-1] == faces.done["id"]


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_uploaded_dataset_trains_a_job(faces: Faces) -> None:
    content = b'{"prompt": "2+2?", "answer": "4"}\n\n{"prompt": "1+3?", "answer": "4"}\n'
    uploaded = faces.ada.post("/api/v1/datasets", content=content).json()
    assert uploaded["rows"] == 2
    environment = {"id": "jsonl", "dataset": uploaded["dataset"], "verifier": "exact"}
    wanted = job(name="uploaded", environment=environment, stop={"steps": 1})
    refused(faces.bob.post("/api/v1/jobs", json=wanted), 422)
    id = faces.ada.post("/api/v1/jobs", json=wanted).json()["id"]
    assert end_of(faces.ada, id)[1]["state"] == "completed"


def test_upload_is_deleted_once_no_job_that_runs_uses_it(faces: Faces) -> None:
    digest = faces.ada.post("/api/v1/datasets", content=b'{"prompt": "3+3?", "answer": "6"}\n').json()["dataset"]
    stored = faces.ada.get("/api/v1/uploads").json()[-1]
    assert stored == {"hash": digest, "kind": "dataset", "size": 34, "created": stored["created"]}
    assert digest not in faces.bob.get("/api/v1/uploads").text
    wanted = job(environment={"id": "jsonl", "dataset": digest, "verifier": "exact"}, stop={"steps": 100_000})
    id = faces.ada.post("/api/v1/jobs", json=wanted).json()["id"]
    assert id in refused(faces.ada.delete(f"/api/v1/uploads/{digest}"), 409)
    faces.ada.post(f"/api/v1/jobs/{id}/cancel").raise_for_status()
    refused(faces.bob.delete(f"/api/v1/uploads/{digest}"), 404)
    assert faces.ada.delete(f"/api/v1/uploads/{digest}").status_code == 204
    assert digest not in {folder.name for folder in (faces.root / "data" / "artifacts").rglob("*")}
    refused(faces.ada.delete(f"/api/v1/uploads/{digest}"), 404)
    refused(faces.ada.post("/api/v1/jobs", json=wanted), 422)


def test_dataset_is_never_held_whole(faces: Faces) -> None:
    """24 times its size was held while it was checked."""
    count = 100_000

    def content() -> Iterator[bytes]:
        for number in range(0, count, 1000):
            yield b"".join(b'{"prompt": "%d", "answer": "4"}\n' % row for row in range(number, number + 1000))

    tracemalloc.start()
    try:
        uploaded = faces.ada.post("/api/v1/datasets", content=content()).json()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert uploaded["rows"] == count
    assert most < 4 << 20


def test_bad_upload_is_refused_with_the_line_number(faces: Faces) -> None:
    assert "line 2" in refused(faces.ada.post("/api/v1/datasets", content=b'{"prompt": "?"}\nnonsense\n'), 400)
    refused(faces.ada.post("/api/v1/datasets", content=b""), 400)
    refused(faces.ada.post("/api/v1/adapters", content=b"no tar"), 400)
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w"):
        pass
    assert "adapter_config.json" in refused(faces.ada.post("/api/v1/adapters", content=empty.getvalue()), 400)


def test_archive_uses_no_more_memory_than_its_size(faces: Faces) -> None:
    """Neither compressed nor with holes."""
    zeros = io.BytesIO()
    with tarfile.open(fileobj=zeros, mode="w:gz") as archive:
        about = tarfile.TarInfo("adapter_model.safetensors")
        about.size = 50 << 20
        archive.addfile(about, io.BytesIO(bytes(about.size)))
    assert "not compressed" in refused(faces.ada.post("/api/v1/adapters", content=zeros.getvalue()), 400)
    about = tarfile.TarInfo("adapter_model.safetensors")
    about.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": about.name,
        "GNU.sparse.map": "0,0", "GNU.sparse.size": str(50 << 20), "GNU.sparse.realsize": str(50 << 20),
    }  # fmt: skip
    holes = about.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    assert "larger than the archive" in refused(faces.ada.post("/api/v1/adapters", content=holes), 400)
    sparse = old_sparse("adapter_model.safetensors", 1000, 3000)
    assert "is sparse" in refused(faces.ada.post("/api/v1/adapters", content=sparse * 3 + bytes(1024)), 400)


def old_sparse(name: str, stored: int, said: int) -> bytes:
    """A member as GNU tar wrote holes before there was PAX: the first ``stored`` bytes of ``said``."""
    about = tarfile.TarInfo(name)
    about.size, about.type = stored, tarfile.GNUTYPE_SPARSE
    header = bytearray(about.tobuf(tarfile.GNU_FORMAT))
    header[386:410] = b"%011o\0%011o\0" % (0, stored)  # the first piece: where it lies, and how long it is
    header[483:495] = b"%011o\0" % said
    header[148:156] = b"        "  # what the sum is computed with in the sum's place
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(stored + -stored % 512)


def test_broken_archive_is_refused_at_once(faces: Faces) -> None:
    """Also one that would be read for ever, and one that is read as something else than was meant."""
    config, weights = (tarfile.TarInfo(name) for name in ("adapter_config.json", "adapter_model.safetensors"))
    backwards = tarfile.TarInfo("readme")
    backwards.size = -512  # what follows it is its own header
    link = tarfile.TarInfo(weights.name)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    endless = bytearray(old_sparse(weights.name, 0, 0)[:512])
    endless[482] = 1  # further pieces follow, it says
    endless[148:156] = b"        "
    endless[148:156] = b"%06o\0 " % sum(endless)
    for content, said in (
        (link.tobuf() + bytes(1024), "adapter_model.safetensors is not a regular file"),
        (config.tobuf() * 2 + bytes(1024), "adapter_config.json twice"),
        (tarfile.TarInfo("readme").tobuf() * 300 + bytes(1024), "more than 256 files"),
        (bytes(endless), "not a tar archive"),
        (config.tobuf(tarfile.GNU_FORMAT) + backwards.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "adapter"),
    ):
        assert said in refused(faces.ada.post("/api/v1/adapters", content=content, timeout=20), 400)


def test_lone_surrogate_in_a_job_is_refused(faces: Faces) -> None:
    written = json.dumps(job(name="half", environment={"hosted": "x", "note": "\ud83d"}))
    for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run"):
        headers = {"Content-Type": "application/json"}
        assert "half of one" in refused(faces.ada.post(path, content=written, headers=headers), 422)
    assert "half" not in [row["name"] for row in faces.ada.get("/api/v1/jobs").json()]


def adapter_archive(value: float = 3.0, weights: bytes | None = None, **options: Any) -> bytes:
    """A tar of a PEFT folder, whose weights follow its configuration, with these options."""
    tar, files = io.BytesIO(), adapter_files(value)
    files["adapter_config.json"] = json.dumps({**json.loads(files["adapter_config.json"]), **options}).encode()
    files["adapter_model.safetensors"] = weights or files["adapter_model.safetensors"]
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(f"folder/{name}")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return tar.getvalue()


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        (adapter_archive(init_lora_weights="pissa"), "init_lora_weights.*path_initial_model_for_weight_conversion"),
        (adapter_archive(init_lora_weights="olora"), "init_lora_weights"),
        (adapter_archive(alora_invocation_tokens=[1]), "alora_invocation_tokens"),
        (adapter_archive(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (adapter_archive(use_dora=True), "use_dora"),
        (adapter_archive(of_tomorrow=True), "of_tomorrow"),
        (adapter_archive(r=8), "do not fit rank r = 8"),
        (adapter_archive(value=math.nan), "self_attn.q_proj.lora_A.weight' has a number that is NaN or infinite"),
        (adapter_archive(value=math.inf), "NaN or infinite"),
        (adapter_archive(weights=b"no tensors"), "no safetensors file"),
        (adapter_archive(weights=adapter_files(1.0)["adapter_model.safetensors"][:-1]), "no safetensors file"),
    ],
    ids=range(11),
)
def test_an_adapter_that_is_no_plain_lora_is_refused_at_upload(faces: Faces, archive: bytes, said: str) -> None:
    before = faces.ada.get("/api/v1/uploads").json()
    assert re.search(said, refused(faces.ada.post("/api/v1/adapters", content=archive), 400))
    assert faces.ada.get("/api/v1/uploads").json() == before


def test_job_starts_from_an_uploaded_adapter(faces: Faces) -> None:
    digest = faces.ada.post("/api/v1/adapters", content=adapter_archive()).json()["adapter"]
    start = {"main": {"rank": 4, "targets": ["q"], "warm_start": {"upload": digest}}}
    wanted = job(name="warm", policies=start, stop={"steps": 1})
    refused(faces.bob.post("/api/v1/jobs", json=wanted), 422)
    id = faces.ada.post("/api/v1/jobs", json=wanted).json()["id"]
    assert end_of(faces.ada, id)[1]["state"] == "completed"


def test_upload_above_the_limit_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, upload_bytes=2000) as service:
        headers = {"X-API-Key": service.key}
        with httpx.Client(base_url=service.url, headers=headers, timeout=60) as client:
            assert "2000" in refused(client.post("/api/v1/datasets", content=b"x" * 3000), 413)
            for path in ("/api/v1/jobs", "/api/v1/sample", "/v1/chat/completions", "/v1/completions"):
                assert client.post(path, content=b"x" * 3000).status_code == 413
                assert client.post(path, content=iter([b"x" * 1500] * 2)).status_code == 413


def test_json_has_a_lower_limit_than_files(faces: Faces) -> None:
    """1 MB; training data of the Tinker API may have 16 MB."""
    row = json.dumps({"prompt": "?", "answer": "x" * (17 << 20)}).encode()
    headers = {"Content-Type": "application/json"}
    for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run", "/api/v1/sample"):
        assert str(1 << 20) in refused(faces.ada.post(path, content=row, headers=headers), 413)
    assert "/api/v1/datasets" in refused(faces.ada.post("/api/v1/jobs", content=row, headers=headers), 413)
    training = "/tinker/api/v1/forward_backward"
    for path in ("/v1/completions", "/v1/chat/completions", "/tinker/api/v1/asample", "/tinker/api/v1/optim_step"):
        for sent, code in ((row[: 1 << 20], 400), (row[: (1 << 20) + 1], 413), (row, 413)):
            assert faces.ada.post(path, content=sent, headers=headers).status_code == code, (path, len(sent))
    assert "forward_backward takes" in refused(faces.ada.post(training, content=row, headers=headers), 400)
    headers = {"Content-Type": "application/x-protobuf"}
    for size, code, said in (
        (16 << 20, 400, "the body is no ForwardBackwardRequest"),
        ((16 << 20) + 1, 413, "more than 16777216 bytes; the limit is the service's setting ROOKERY_TRAINING_BYTES"),
        (17 << 20, 413, "more than 16777216 bytes"),
    ):
        assert said in refused(faces.ada.post(training, content=b"\xff" * size, headers=headers), code)
    assert "more than 262144 bytes" in refused(faces.ada.post("/api/v1/datasets", content=row), 400)
    rows = (json.dumps({"prompt": "?", "answer": "x" * (17 << 10)}) + "\n").encode() * 1024
    assert faces.ada.post("/api/v1/datasets", content=rows).status_code == 201


# --- whose it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "Authorization: Bearer tml-wrong\r\n", "X-API-Key: tml-wrong\r\n"])
def test_body_is_not_read_without_a_valid_key(faces: Faces, key: str) -> None:
    """The answer comes while the body does not."""
    url = httpx.URL(faces.service.url)
    for path in (
        *("/api/v1/jobs", "/api/v1/jobs/dry-run", "/api/v1/sample", "/api/v1/datasets", "/api/v1/adapters"),
        *("/api/v1/tenants", "/v1/chat/completions", "/v1/completions", "/tinker/api/v1/forward_backward"),
        *("/tinker/api/v1/asample", "/tinker/oai/api/v1/completions"),
    ):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n{key}\r\n"
        with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
            connection.sendall(head.encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 "), path


def test_missing_and_wrong_key_get_the_same_refusal(faces: Faces) -> None:
    document = faces.ada.get("/openapi.json").json()
    checked = 0
    for path, methods in document["paths"].items():
        if not path.startswith("/api/") or path.startswith("/api/v1/sign-in"):  # those have tests/server/test_page.py
            continue
        for method in methods:
            named = {"job": faces.done["id"], "policy": "main", "version": "1", "action": "pause"}
            url = path.format_map(defaultdict(lambda: "unknown", named))
            for headers in ({}, {"Authorization": "Bearer tml-wrong"}, {"X-API-Key": "tml-wrong"}):
                response = httpx.request(method, faces.service.url + url, headers=headers, json={}, timeout=60)
                assert response.status_code == 401, (method, url, response.text)
                checked += 1
    assert checked > 50


def test_secret_files_are_private_and_keys_are_stored_hashed(faces: Faces) -> None:
    for name in ("admin.key", "worker.token", "rookery.db", "rookery.db-wal"):
        assert stat.S_IMODE((faces.root / "data" / name).stat().st_mode) == 0o600
    assert faces.service.key.startswith("tml-")
    database = (faces.root / "data" / "rookery.db").read_bytes()
    database += (faces.root / "data" / "rookery.db-wal").read_bytes()
    assert faces.service.key.encode() not in database
    assert hashlib.sha256(faces.service.key.encode()).hexdigest().encode() in database


# --- tickets ----------------------------------------------------------------------------------------------------------


def test_worker_reads_artifacts_with_its_ticket(faces: Faces) -> None:
    asked = {"target": faces.done["id"], "messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
    assert faces.ada.post("/api/v1/sample", json=asked).status_code == 200
    whole = adapter_files(2.0)["adapter_model.safetensors"]
    assert whole in faces.worker.read.values() and whole[10:] in faces.worker.read.values()


# --- the service ------------------------------------------------------------------------------------------------------


def test_a_gauge_of_the_table_reaches_metrics_and_views(faces: Faces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the table and the worker that measures it knows its name."""
    monkeypatch.setitem(GAUGES, "test_figure_bytes", Gauge("A figure of this test", "bytes", "max"))
    monkeypatch.setattr(faces.worker, "gauges", {"test_figure_bytes": 7.5, "stranger": 1.0, "absurd": math.nan})

    def arrived() -> bool:
        (worker,) = faces.admin.get("/api/v1/workers").json()
        gauges = worker["beat"]["gauges"] if worker["beat"] else {}
        return gauges == {"test_figure_bytes": 7.5, "stranger": 1.0, "absurd": None}

    until(arrived, lambda: faces.admin.get("/api/v1/workers").text)
    text = httpx.get(f"{faces.service.url}/metrics", timeout=60).text
    assert "# HELP rookery_test_figure_bytes A figure of this test\n" in text
    assert "\nrookery_test_figure_bytes 7.5\n" in text
    assert "stranger" not in text, "a worker makes no metrics of the service"


def test_health_metrics_and_openapi_document(faces: Faces) -> None:
    assert httpx.get(f"{faces.service.url}/healthz", timeout=60).json()["service"] == "rookery"
    assert faces.ada.get("/api/v1/health").json()["totals"]["sampled_tokens"] > 0
    text = httpx.get(f"{faces.service.url}/metrics", timeout=60).text
    assert 'rookery_jobs{state="completed"}' in text and "rookery_sampled_tokens_total" in text
    for secret in (faces.done["id"], "ada", "sums"):
        assert not re.search(rf"\b{secret}\b", text)
    told = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^(rookery_\w+)", text, re.MULTILINE))
    documented = {*re.findall(r"`(rookery_\w*\w)`", told), *(f"rookery_{name}" for name in GAUGES)} - {"rookery_"}
    documented |= set(re.findall(r"`(rookery_\w+)\{", told))
    assert documented == {name for name in shown if not name.endswith("_created")}
    document = httpx.get(f"{faces.service.url}/openapi.json", timeout=60).json()
    schemas = document["components"]["schemas"]
    assert "group_size" in schemas["AlgorithmSpec"]["properties"]
    submit = document["paths"]["/api/v1/jobs"]["post"]
    assert submit["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/JobSpec"}
    assert "waits_for" in schemas["JobView"]["properties"]
    assert httpx.get(f"{faces.service.url}/docs", timeout=60).status_code == 200
    models = {row["name"]: row["state"] for row in faces.ada.get("/api/v1/models").json()}
    assert models[MODEL] == "loaded" and models["qwen3-1.7b"] == "known"


def test_responses_match_the_documented_models(faces: Faces) -> None:
    """Every field of a real response is documented with its type."""
    path = f"/api/v1/jobs/{faces.done['id']}"
    asked = faces.ada.post("/api/v1/jobs", json=job(name="measured", evaluation={"prompts": 2}, stop={"steps": 1}))
    measured = end_of(faces.ada, asked.json()["id"])[1]
    assert measured["state"] == "completed"
    for client, address, shape in (
        (faces.ada, f"{path}/metrics", schemas.MetricsRow),
        (faces.ada, f"{path}/events", views.JobEvent),
        (faces.ada, f"{path}/trajectories", episode_views.EpisodeView),
        (faces.ada, f"/api/v1/jobs/{measured['id']}/evaluations", views.EvaluationView),
        (faces.ada, f"{path}/policies/main/versions", views.VersionView),
        (faces.ada, "/api/v1/models", views.BaseModelView),
        (faces.admin, "/api/v1/workers", views.WorkerView),
    ):
        rows = client.get(address).json()
        assert rows, address
        known = {field.alias or name for name, field in shape.model_fields.items()}
        for row in rows:
            shape.model_validate(row)
            families = ("reward/", "reward_episodes/", "lag_share/") if shape is schemas.MetricsRow else ()
            more = {name for name in row if not name.startswith(families)}
            assert more <= known, address
    views.Health.model_validate(faces.ada.get("/api/v1/health").json())
    costs = views.Costs.model_validate(faces.admin.get("/api/v1/costs").json())
    assert [row.tenant for row in costs.tenants] == [row["id"] for row in faces.admin.get("/api/v1/tenants").json()]
    for row in costs.tenants:
        keys = faces.admin.get(f"/api/v1/tenants/{row.tenant}/keys").json()
        assert keys and all(schemas.KeyView.model_validate(key) for key in keys)
    episode_views.DryRun.model_validate(faces.ada.post("/api/v1/jobs/dry-run", json=job()).json())


def test_interrupted_upload_does_not_harm_the_service(faces: Faces) -> None:
    address = faces.service.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as raw:
        request = (
            f"POST /api/v1/datasets HTTP/1.1\r\nHost: x\r\nX-API-Key: {faces.service.key}\r\n"
            "Content-Length: 1000\r\n\r\nhalf"
        )
        raw.sendall(request.encode())
    assert faces.ada.get("/api/v1/health").status_code == 200


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("no_such", "'no_such'.* does not know as a causal language model; .*: pip install --upgrade transformers"),
        ("gemma3_text", "ROOKERY_INFERENCE_ENGINE is native, but .* the family gemma3_text; set it to auto"),
    ],
)
def test_a_model_that_no_engine_can_load_is_refused_at_the_start(family: str, says: str, tmp_path: Path) -> None:
    for name, content in (("config.json", json.dumps({"model_type": family})), ("model.safetensors", "")):
        (tmp_path / name).write_text(content)
    (tmp_path / "tokenizer.json").touch()
    settings = Settings.load({}, data=tmp_path / "data", port=0, models=str(tmp_path), inference_engine="native")
    with pytest.raises(UserError, match=says) as refusal:
        EmbeddedService(settings).__enter__()
    assert "\n" not in str(refusal.value) and not (tmp_path / "data").exists()


def test_port_in_use_and_second_service_are_refused(faces: Faces, tmp_path: Path) -> None:
    port = int(faces.service.url.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=rf"port {port} .*--port"):
        EmbeddedService(Settings.load({}, data=tmp_path, port=port, models="", workers=0)).__enter__()
    with pytest.raises(UserError, match="in use by another service"):
        EmbeddedService(Settings.load({}, data=faces.root / "data", port=0, models="", workers=0)).__enter__()
    with served(tmp_path) as second:  # what was refused left nothing locked
        assert httpx.get(f"{second.url}/healthz", timeout=60).status_code == 200


@pytest.mark.parametrize(("host", "dialled"), [("::", ("[::1]", "127.0.0.1")), ("0.0.0.0", ("127.0.0.1",))])
def test_a_service_on_all_addresses_is_reached_by_both_protocols(
    host: str, dialled: tuple[str, ...], tmp_path: Path
) -> None:
    """As probes and clients of a cluster with both reach it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6, dualstack_ipv6=False).close()
    except OSError:
        pytest.skip("no address of IPv6 here")
    with served(tmp_path, host=host) as service:
        port = service.url.rpartition(":")[2]
        for address in dialled:
            assert httpx.get(f"http://{address}:{port}/healthz", timeout=60).json()["service"] == "rookery"


def test_stop_ends_streams_and_jobs_resume_at_the_next_start(tmp_path: Path) -> None:
    opened, ended = threading.Event(), threading.Event()

    def follow(url: str, key: str, id: str) -> None:
        path = f"{url}/api/v1/jobs/{id}/metrics/stream"
        with httpx.stream("GET", path, headers={"X-API-Key": key}, timeout=60) as response:
            for _ in response.iter_lines():
                opened.set()
        ended.set()

    with served(tmp_path) as service:
        headers = {"X-API-Key": service.key}
        id = httpx.post(f"{service.url}/api/v1/jobs", json=job(), headers=headers, timeout=60).json()["id"]
        reader = threading.Thread(target=follow, args=(service.url, service.key, id))
        reader.start()
        assert opened.wait(30)
    reader.join(30)
    assert ended.is_set()
    with (
        served(tmp_path) as service,
        httpx.Client(base_url=service.url, headers=headers, timeout=60) as client,
        ThreadedWorker.of(service),
    ):
        assert end_of(client, id)[1]["state"] == "completed"


def test_pages_of_metrics_are_bounded_and_give_every_row(faces: Faces) -> None:
    path = f"/api/v1/jobs/{faces.done['id']}/metrics"
    every = faces.ada.get(path, params={"limit": 10_000}).json()
    first = faces.ada.get(path, params={"limit": 1})
    rest = faces.ada.get(path, params={"after": first.headers["X-Next-Page"]})
    assert first.json() + rest.json() == every and len(every) == 2
    assert "limit" in refused(faces.ada.get(path, params={"limit": 10_001}), 422)


def test_a_reader_that_leaves_a_quiet_stream_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        served(tmp_path) as service,
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client,
    ):
        id = client.post("/api/v1/jobs", json=job()).json()["id"]
        path = f"/api/v1/jobs/{id}/metrics/stream"
        for _ in range(3):
            with client.stream("GET", path) as response:
                assert next(response.iter_lines())
    gc.collect()  # tasks whose exception nobody took say so when they are collected
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("method", "path", "line"),
    [
        ("GET", "/api/v1/runs?states=paused", "states: unknown parameter; did you mean state?"),
        ("GET", "/api/v1/runs?foo=1&state=paused&bar", "foo: unknown parameter; allowed: state, text, id, order"),
        ("GET", "/api/v1/jobs?limit=1&stat=paused", "stat: unknown parameter; allowed: limit, after"),
        ("GET", "/api/v1/account?x=1", "x: unknown parameter; this route has none"),
        ("POST", "/api/v1/jobs/dry-run?key=1", "key: unknown parameter"),
        ("DELETE", "/api/v1/uploads/x?force=1", "force: unknown parameter"),
    ],
)
def test_unknown_parameters_of_an_address_are_refused(faces: Faces, method: str, path: str, line: str) -> None:
    assert line in refused(faces.ada.request(method, path), 422)
    assert faces.ada.get("/v1/models?foo=1").status_code == 200, "clients of OpenAI's API may send newer ones"
