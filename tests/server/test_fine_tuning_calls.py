"""Single calls of OpenAI's fine-tuning API by the unmodified SDK, on a worker that computes nothing."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.support.faces import MODEL, ThreadedWorker, served
from tests.support.waiting import until

from rookery.storage.artifacts import MANIFEST

ROWS = b"\n".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "4"}]}).encode()
    for n in range(4)
)
CHECK: dict[str, Any] = {
    "type": "string_check", "name": "right", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    "operation": "eq",
}  # fmt: skip


@dataclass
class Called:
    client: openai.OpenAI
    http: httpx.Client
    data: Path
    """The service's folder."""

    def upload(self, content: bytes = ROWS) -> str:
        return self.client.files.create(file=("rows.jsonl", content), purpose="fine-tune").id

    def done(self, **asked: Any) -> Any:
        """A job that has succeeded."""
        jobs = self.client.fine_tuning.jobs
        job = jobs.create(**{"model": MODEL, "training_file": self.upload(), **asked}).id
        return until(lambda: found if (found := jobs.retrieve(job)).status == "succeeded" else None)


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Called]:
    with served(tmp_path_factory.mktemp("calls")) as service, ThreadedWorker.of(service):
        headers = {"Authorization": f"Bearer {service.key}"}
        with httpx.Client(base_url=f"{service.url}/v1", headers=headers, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)
            until(lambda: any(model.id == MODEL for model in client.models.list()))
            yield Called(client, http, service.settings.data)


def form(*parts: tuple[str, bytes]) -> list[tuple[str, Any]]:
    return [(name, ("rows.jsonl", value) if name == "file" else (None, value)) for name, value in parts]


PURPOSE, FILE = ("purpose", b"fine-tune"), ("file", ROWS)


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ([PURPOSE, FILE], ""),
        ([FILE, PURPOSE], ""),  # as openai-node sends what its manual shows
        ([FILE], "purpose"),
        ([FILE, ("purpose", b"batch")], "purpose"),
        ([("purpose", b"batch"), FILE], "purpose"),
        ([FILE, PURPOSE, ("expires_after[seconds]", b"60")], "expires_after[seconds]"),
        ([PURPOSE], "file"),
        ([("file", b"[1]"), PURPOSE], "file"),
    ],
)
def test_the_purpose_of_a_file_may_stand_on_either_side_of_it(
    called: Called, parts: list[tuple[str, bytes]], param: str
) -> None:
    known = {one.id for one in called.client.files.list()}
    answer = called.http.post("/files", files=form(*parts)).json()
    if param:
        assert answer["error"]["param"] == param, answer
        assert {one.id for one in called.client.files.list()} == known, "nothing of it stays"
        return
    for wanted in ({}, {"Range": "bytes=abc"}, {"Range": "bytes=2-3"}, {"Range": "bytes=9999-"}):
        found = called.http.get(f"/files/{answer['id']}/content", headers=wanted)
        assert (found.status_code, found.content) == (200, ROWS)
        assert found.headers["Accept-Ranges"] == "none"


@pytest.mark.parametrize("name", ["rows.jsonl", "größe 数.jsonl", 'of "a".jsonl'])
def test_a_file_has_its_name_wherever_it_is_read(called: Called, name: str) -> None:
    """The one of its last upload."""
    made = called.client.files.create(file=(name, ROWS + b"\n"), purpose="fine-tune")
    (listed,) = [file for file in called.client.files.list() if file.id == made.id]
    assert [file.filename for file in (made, called.client.files.retrieve(made.id), listed)] == [name] * 3


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "param", "said"),
    [
        ("POST", "files", {"files": {"file": (None, ROWS), "purpose": (None, "fine-tune")}}, 400, "file", "curl -F"),
        ("POST", "files", {"files": {"file": ("a", ROWS), "color": (None, "red")}}, 400, "color",
         "color: unknown field; the form has purpose and file"),
        ("POST", "files", {"files": {"file": ("a", ROWS), "expires_after[anchor]": (None, "created_at")}}, 400,
         "expires_after[anchor]", "files are kept until they are deleted"),
        ("POST", "files", {"files": {"file": ("a", ROWS)}, "headers": {"Content-Encoding": "gzip"}}, 400, None,
         "Content-Encoding gzip, which is not read"),
        ("GET", "fine_tuning/jobs?after=ftjob-none", {}, 404, "after", "no fine-tuning job"),
        ("GET", "fine_tuning/jobs/ftjob-none", {}, 404, "fine_tuning_job_id", "no fine-tuning job"),
    ],
)  # fmt: skip
def test_mistakes_name_the_field_that_was_sent(
    called: Called, method: str, path: str, sent: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    refused = called.http.request(method, f"/{path}", **sent)
    assert refused.status_code == status, refused.text
    error = refused.json()["error"]
    assert said in error["message"] and (param is None or error["param"] == param)


LORA = {"rank": 4, "targets": ["q"]}
"""As the worker's adapters are."""


def start(called: Called) -> str:
    """The id of a job whose model, ``first``, others start from."""
    rows = called.upload().removeprefix("file-")
    submitted = called.http.post("/../api/v1/jobs", json={
        "name": "first", "base_model": MODEL, "environment": {"id": "demonstrations", "dataset": rows},
        "algorithm": {"name": "sft", "batch_size": 2}, "policies": {"main": LORA}, "stop": {"steps": 2},
    }).json()  # fmt: skip
    first = str(submitted["id"]).removeprefix("job-")
    until(lambda: called.client.fine_tuning.jobs.retrieve(f"ftjob-{first}").status == "succeeded")
    return first


def test_a_job_starts_from_a_fine_tuned_model(called: Called) -> None:
    first = start(called)
    model = f"ft:{MODEL}:admin:first:{first}"
    for name, version in ((model, 2), (f"{model}:ckpt-step-1", 1)):
        further = called.done(model=name)
        assert further.model == MODEL and first not in further.fine_tuned_model
        spec = called.http.get(f"/../api/v1/jobs/job-{further.id.removeprefix('ftjob-')}").json()["spec"]
        policy = spec["policies"]["main"]
        assert {name: policy[name] for name in LORA} == LORA
        assert (policy["warm_start"]["job"], policy["warm_start"]["version"]) == (f"job-{first}", version)
    others = (
        f"{model}0", f"{model}:ckpt-step-9", f"{model}:ckpt-step-", "ft:", f"ft:other:admin:first:{first}",
        f"ft:{MODEL}:admin:second:{first}", f"ft:{MODEL}:admin::{first}", f"ft:{first}",
        f"ft:{MODEL}:admin:x:first:{first}", f"ft:{MODEL}:first:{first}", f"ft:x:y:z:{first}",
    )  # fmt: skip
    for name in others:
        with pytest.raises(openai.NotFoundError, match="no fine-tuned model") as refused:
            called.done(model=name)
        assert refused.value.param == "model"
        if "ckpt" not in name:
            with pytest.raises(openai.NotFoundError):
                called.client.models.delete(name)
    assert called.http.get(f"/../api/v1/jobs/job-{first}").status_code == 200


@pytest.mark.parametrize("checkpoint", ["", ":ckpt-step-1"])
def test_a_repeated_key_returns_its_job(called: Called, checkpoint: str) -> None:
    """Also when its file, and the model from which it starts, are deleted."""
    first, file = start(called), called.upload(ROWS + b"\n" + ROWS)
    model, key = f"ft:{MODEL}:admin:first:{first}", {"Idempotency-Key": f"repeated {first}"}
    asked: dict[str, Any] = {"model": model + checkpoint, "training_file": file, "extra_headers": key}
    jobs = called.client.fine_tuning.jobs
    made = jobs.create(**asked)
    assert jobs.create(**asked).id == made.id
    until(lambda: jobs.retrieve(made.id).status == "succeeded")
    deletions: list[tuple[Callable[[str], Any], str, str]] = [
        (called.client.files.delete, file, "no dataset"),
        (called.client.models.delete, model, "no fine-tuned model"),
    ]
    for delete, name, lost in deletions:
        delete(name)
        assert jobs.create(**asked).id == made.id
        for change in ({"seed": 5}, {"extra_headers": {}}):
            with pytest.raises(openai.APIStatusError, match=lost):
                jobs.create(**{**asked, **change})


@pytest.mark.parametrize("change", [{"seed": 5}, {"suffix": "b"}, {"metadata": {"a": "b"}}], ids=str)
def test_a_key_of_another_job_is_refused(called: Called, change: dict[str, Any]) -> None:
    jobs, key = called.client.fine_tuning.jobs, {"Idempotency-Key": f"of one job {change}"}
    asked: dict[str, Any] = {"model": MODEL, "training_file": called.upload(), "extra_headers": key}
    made = jobs.create(**asked)
    with pytest.raises(openai.ConflictError, match="was used for another job") as refused:
        jobs.create(**{**asked, **change})
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert jobs.create(**asked).id == made.id


def test_an_interval_of_evaluations_needs_rows_for_them(called: Called) -> None:
    method: Any = {"type": "reinforcement", "reinforcement": {"grader": CHECK, "hyperparameters": {"eval_interval": 2}}}
    with pytest.raises(openai.BadRequestError, match="needs a validation_file") as refused:
        called.client.fine_tuning.jobs.create(model=MODEL, training_file=called.upload(), method=method)
    assert refused.value.param == "method.reinforcement.hyperparameters.eval_interval"


def test_a_job_starts_from_the_first_policy_of_a_job_with_several(called: Called) -> None:
    """The one that answers by the job's own name, whatever the order of the names."""
    lora = {"rank": 4, "targets": ["q"]}
    judge = {"name": "judge", "policy": "judge", "prompt": "Is it {answer}?", "scale": 4}
    submitted = called.http.post("/../api/v1/jobs", json={
        "name": "first", "base_model": MODEL, "stop": {"steps": 1},
        "policies": {"solver": lora, "judge": {"train": False, "base": True}},
        "environment": {"id": "jsonl", "rows": [{"prompt": "1+1?", "answer": "2"}], "verifier": judge},
        "algorithm": {"group_size": 2, "groups_per_step": 1},
    }).json()  # fmt: skip
    path = f"/../api/v1/jobs/{submitted['id']}"
    until(lambda: called.http.get(path).json()["state"] == "completed")
    model = f"ft:{MODEL}:admin:first:{submitted['id'].removeprefix('job-')}"
    with pytest.raises(openai.NotFoundError, match="no fine-tuned model"):
        called.client.models.delete(model)  # it is a job of another API
    for name in (model, f"{model}:ckpt-step-1"):
        further = called.done(model=name)
        spec = called.http.get(f"/../api/v1/jobs/job-{further.id.removeprefix('ftjob-')}").json()["spec"]
        assert spec["policies"]["main"]["warm_start"]["policy"] == "solver"


def test_fine_tuned_models_are_listed_by_their_names(called: Called) -> None:
    name = called.done(suffix="listed").fine_tuned_model
    assert ":listed:" in name and name in [model.id for model in called.client.models.list()]
    assert called.client.models.delete(name).deleted
    assert name not in [model.id for model in called.client.models.list()]


def test_every_response_has_the_tokens_that_a_job_trained_on(called: Called) -> None:
    asked = {"training_file": called.upload(), "extra_headers": {"Idempotency-Key": "counted"}}
    done, jobs = called.done(**asked), called.client.fine_tuning.jobs
    rows = called.http.get(f"/../api/v1/jobs/job-{done.id.removeprefix('ftjob-')}/metrics").json()
    assert done.trained_tokens == sum(row["tokens"] for row in rows) > 0
    (listed,) = [job for job in jobs.list() if job.id == done.id]
    again = jobs.create(model=MODEL, **asked)
    assert done.to_dict() == listed.to_dict() == again.to_dict()


def test_responses_are_of_the_sdks_types(called: Called) -> None:
    """The SDK takes anything, and attributes are absent; told to be strict, it refuses what is not of its types."""
    done, url = called.done(validation_file=called.upload(ROWS + b"\n"), metadata={"a": "b"}), called.client.base_url
    with openai.OpenAI(
        base_url=url, api_key=called.client.api_key, max_retries=0, _strict_response_validation=True
    ) as strict:
        jobs, graders = strict.fine_tuning.jobs, strict.fine_tuning.alpha.graders
        assert jobs.retrieve(done.id).id == done.id in [job.id for job in jobs.list()]
        assert list(jobs.list_events(done.id)) and list(jobs.checkpoints.list(done.id))
        method: Any = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
        with pytest.raises(openai.BadRequestError, match="training_file"):
            jobs.create(model=MODEL, training_file=done.training_file, method=method)
        file = strict.files.create(file=("rows.jsonl", ROWS), purpose="fine-tune")
        assert strict.files.retrieve(file.id).id in [one.id for one in strict.files.list()]
        assert strict.files.delete(file.id).deleted
        run = graders.run(grader=CHECK, model_sample="4", item={"answer": "4"})
        assert run.reward == 1.0 and graders.validate(grader=CHECK)
        assert strict.models.retrieve(done.fine_tuned_model).id in [model.id for model in strict.models.list()]
        assert strict.models.delete(done.fine_tuned_model).deleted


def test_jobs_are_listed_by_metadata_and_by_its_absence(called: Called) -> None:
    team, plain = called.done(metadata={"team": "a"}).id, called.done().id

    def listed(**query: str) -> list[str]:
        return [one["id"] for one in called.http.get("/fine_tuning/jobs", params=query).json()["data"]]

    assert listed(**{"metadata[team]": "a"}) == [team]
    assert team in listed() and plain in listed()
    assert plain in listed(metadata="null") and team not in listed(metadata="null")


def test_lists_continue_behind_deleted_rows(called: Called) -> None:
    """As programs do that delete what they list."""
    row = ROWS.partition(b"\n")[0] + b"\n"
    newest = [called.upload(row * number) for number in range(2, 7)][-1]
    assert called.client.files.list(limit=1).data[0].id == newest
    assert [file.id for file in called.client.files.list(limit=2, order="asc")][-1] == newest
    for file in called.client.files.list(limit=1):
        called.client.files.delete(file.id)
    assert not list(called.client.files.list())
    jobs = {called.done(suffix=f"deleted-{number}").id for number in range(3)}
    for job in called.client.fine_tuning.jobs.list(limit=1):
        if job.id in jobs:
            called.client.models.delete(job.fine_tuned_model)
            jobs.remove(job.id)
    assert not jobs


def test_checkpoints_continue_behind_one_that_is_not_kept(called: Called) -> None:
    job = called.done().id
    checkpoints = called.client.fine_tuning.jobs.checkpoints
    whole = [one.id for one in checkpoints.list(job, limit=1)]
    name, _, newest = whole[0].rpartition("-")
    assert [one.id for one in checkpoints.list(job, after=f"{name}-{int(newest) + 1}").data] == whole
    assert [one.id for one in checkpoints.list(job, after=whole[0]).data] == whole[1:]


def test_lists_and_calls_wait_for_no_file_that_hangs(called: Called) -> None:
    """A tenant's download whose store does not answer delays none of its lists and of its other requests."""
    file = called.upload(ROWS.replace(b"\n", b" \n"))
    [manifest] = (called.data / "artifacts").rglob(f"{file.removeprefix('file-')}/{MANIFEST}")
    held = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)  # a reader waits until it is written
    with ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(called.http.get, f"/files/{file}/content")
        until(lambda: any(thread.name.startswith("open") for thread in threading.enumerate()))
        base = called.http.base_url
        for path in ("/api/v1/jobs", "/v1/files", "/v1/fine_tuning/jobs"):
            assert called.http.get(base.copy_with(path=path), timeout=10).status_code == 200
        grader = {"grader": CHECK}
        assert called.http.post("/fine_tuning/alpha/graders/validate", json=grader, timeout=30).status_code == 200
        assert not hangs.done()
        manifest.write_bytes(held)
        hangs.result()
    manifest.unlink()
    manifest.write_bytes(held)
    assert called.http.get(f"/files/{file}/content").content == ROWS.replace(b"\n", b" \n")


def test_a_filter_that_a_list_does_not_have_is_refused(called: Called) -> None:
    job = called.done().id
    for path in (
        "/files",
        "/fine_tuning/jobs",
        *(f"/fine_tuning/jobs/{job}/{name}" for name in ("events", "checkpoints")),
    ):
        assert called.http.get(path, params={"api-version": "2024-10-21"}).status_code == 200
        refused = called.http.get(path, params={"status": "running"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "status"), refused.text


def test_events_are_listed_to_the_first_in_one_order_of_time(called: Called) -> None:
    """Whatever the size of a page, also where a clock was set back, and where steps and lines are of one moment."""
    job, jobs = called.done().id, called.client.fine_tuning.jobs
    before, id = len(list(jobs.list_events(job))), f"job-{job.removeprefix('ftjob-')}"
    times = [float(number * 37 % 1009 // 4) for number in range(1300)]
    with closing(sqlite3.connect(called.data / "rookery.db", timeout=60)) as database, database:
        [tenant] = database.execute("SELECT tenant FROM jobs WHERE id = ?", (id,)).fetchone()
        lines = [(tenant, id, time, "state", f"line {number}") for number, time in enumerate(times)]
        steps = [(tenant, id, step, json.dumps({"step": step}), time) for step, time in enumerate(times[:1200], 1000)]
        database.executemany("INSERT INTO events (tenant, job, time, kind, text) VALUES (?, ?, ?, ?, ?)", lines)
        names = "tenant, job, step, metrics, time, version, policy"
        database.executemany(f"INSERT INTO steps ({names}) VALUES (?, ?, ?, ?, ?, 1, '')", steps)
    whole = list(jobs.list_events(job, limit=100))
    assert len({event.id for event in whole}) == len(whole) == before + len(lines) + len(steps)
    moments = [event.created_at for event in whole]
    assert moments == sorted(moments, reverse=True)
    kinds = [event.type for event in whole if event.created_at == int(times[5])]
    assert kinds == sorted(kinds, key=lambda kind: kind != "metrics") and len({*kinds}) == 2
    assert [event.id for event in jobs.list_events(job, limit=99)] == [event.id for event in whole]
    for after, following in pairwise(whole[:9]):
        assert jobs.list_events(job, limit=1, after=after.id).data[0].id == following.id


def test_an_unknown_cursor_names_its_argument(called: Called) -> None:
    job = called.done().id
    jobs = called.client.fine_tuning.jobs
    for call in (
        lambda: jobs.list_events(job, after="ftevent-x"),
        lambda: jobs.list_events(job, after=f"ftevent-{job.removeprefix('ftjob-')}-s999"),
        lambda: jobs.list_events(job, after=f"ftevent-{job.removeprefix('ftjob-')}-e{10**17}"),
        lambda: jobs.checkpoints.list(job, after="ftckpt_x"),
        lambda: called.client.files.list(after="file-x"),
        lambda: called.client.files.list(after=f"file-{'0' * 64}"),
        lambda: jobs.list(after="ftjob-x"),
        lambda: jobs.list(after="x"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:  # as an unknown id elsewhere
            call()
        assert (refused.value.param, refused.value.code) == ("after", "not_found")


@pytest.mark.parametrize(
    ("grader", "param"),
    [
        (None, "grader"),
        ([CHECK], "grader"),
        ({**CHECK, "type": None}, "grader.type"),
        ({"name": "right"}, "grader.type"),
        ({**CHECK, "type": "endpoint"}, "grader.type"),
        ({**CHECK, "operation": "contains"}, "grader.operation"),
        ({**CHECK, "pass_threshold": 1}, "grader.pass_threshold"),
        ({"type": "multi", "name": "m", "calculate_output": "a"}, "grader.graders"),
        ({"type": "multi", "name": "m", "calculate_output": "a", "graders": [CHECK]}, "grader.graders"),
        ({"type": "multi", "name": "m", "calculate_output": "a", "graders": CHECK}, "grader.graders.type"),
        ({"type": "multi", "name": "m", "calculate_output": "a", "graders": {"a": {}}}, "grader.graders.a.type"),
        ({"type": "multi", "name": "m", "calculate_output": "a", "graders": {"a": {**CHECK, "input": 1}}},
         "grader.graders.a.input"),
        ({"type": "score_model", "name": "m", "model": MODEL, "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "x"}]}]}, "grader.input.0.content.0.type"),
        ({"type": "score_model", "name": "m", "model": MODEL, "input": [{"role": "user"}]}, "grader.input.0.content"),
    ],
)  # fmt: skip
def test_a_malformed_grader_names_its_field(called: Called, grader: Any, param: str) -> None:
    for path, more in (("validate", {}), ("run", {"model_sample": "4", "item": {"answer": "4"}})):
        answer = called.http.post(f"/fine_tuning/alpha/graders/{path}", json={"grader": grader, **more})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param, error
        assert error["message"].startswith(f"{param}: ") and "\n" not in error["message"]
