"""OpenAI's fine-tuning API by the unmodified SDK on the real model: from an upload to a chat with the result, for all
three methods; a job that is paused while the service is killed resumes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.support.ports import free_port
from tests.support.waiting import until

from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.storage.data_dir import ADMIN_KEY_FILE, read_secret

MODEL = "smollm2-135m-instruct"
SECONDS = 600.0
ROWS = 12


def content(rows: list[dict[str, Any]]) -> io.BytesIO:
    return io.BytesIO("\n".join(map(json.dumps, rows)).encode())


def demonstrations() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Which town has the number {n}?"},
                {"role": "assistant", "content": f"Town {n}."},
            ]
        }
        for n in range(ROWS)
    ]


def preferences() -> list[dict[str, Any]]:
    return [
        {
            "input": {"messages": [{"role": "user", "content": f"Say a word, number {n}."}]},
            "preferred_output": [{"role": "assistant", "content": "Certainly: apple."}],
            "non_preferred_output": [{"role": "assistant", "content": "No."}],
        }
        for n in range(8)
    ]


def questions() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"Say yes. {n}"}], "answer": "yes"} for n in range(4)]


GRADER: dict[str, Any] = {
    "type": "multi",
    "name": "both",
    "graders": {
        "right": {
            "type": "string_check", "name": "right", "input": "{{ sample.output_text }}",
            "reference": "{{ item.answer }}", "operation": "ilike",
        },
        "near": {
            "type": "text_similarity", "name": "near", "input": "{{ sample.output_text }}",
            "reference": "{{ item.answer }}", "evaluation_metric": "fuzzy_match",
        },
    },
    "calculate_output": "0.5 * right + 0.5 * near",
}  # fmt: skip


def ended(client: openai.OpenAI, job: str) -> Any:
    """The job once it has ended."""

    def found() -> Any:
        shown = client.fine_tuning.jobs.retrieve(job)
        return shown if shown.status in ("succeeded", "failed", "cancelled") else None

    return until(found, patience=SECONDS, pause=0.5)


def upload(client: openai.OpenAI, rows: list[dict[str, Any]]) -> str:
    return client.files.create(file=("rows.jsonl", content(rows)), purpose="fine-tune").id


def reinforced(client: openai.OpenAI, grader: Any) -> Any:
    """A job of two steps that this grader rewards."""
    return client.fine_tuning.jobs.create(
        model=MODEL, training_file=upload(client, questions()), seed=3,
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": grader,
                "hyperparameters": {"batch_size": 2, "compute_multiplier": 0.5, "n_epochs": 1},
            },
        },
    )  # fmt: skip


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_each_method_ends_with_a_model_to_chat_with(tmp_path: Path) -> None:
    settings = Settings.load(data=tmp_path / "data", port=0, models=MODEL)
    with EmbeddedService(settings) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)
        rows, held_out = upload(client, demonstrations()), upload(client, demonstrations()[:4])
        taught = client.fine_tuning.jobs.create(
            model=MODEL, training_file=rows, validation_file=held_out, suffix="towns", metadata={"team": "a"},
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 4, "batch_size": 4, "learning_rate_multiplier": 3}},
            },
        )  # fmt: skip
        preferred = client.fine_tuning.jobs.create(
            model=MODEL, training_file=upload(client, preferences()),
            method={"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "beta": 0.2}}},
        )  # fmt: skip
        graded = reinforced(client, GRADER)
        assert [one.id for one in client.fine_tuning.jobs.list()] == [graded.id, preferred.id, taught.id]
        assert [one.id for one in client.fine_tuning.jobs.list(metadata={"team": "a"})] == [taught.id]
        for job, steps in ((taught, 12), (preferred, 4), (graded, 2)):
            found = ended(client, job.id)
            assert found.status == "succeeded" and found.error is None, found
            events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))
            assert sum(event.type == "metrics" for event in events) == steps
            assert len({event.id for event in events}) == len(events)
            [newest, *_] = client.fine_tuning.jobs.checkpoints.list(job.id)
            assert newest.step_number == steps
            for name in (found.fine_tuned_model, newest.fine_tuned_model_checkpoint):
                reply = client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": "Which town has the number 3?"}], max_tokens=8,
                    temperature=0,
                )  # fmt: skip
                if job is taught:
                    assert reply.choices[0].message.content == "Town 3.", "it has learned the form of the answers"
        losses = [one.metrics.valid_loss for one in client.fine_tuning.jobs.checkpoints.list(taught.id)]
        assert losses[0] is not None and losses[0] < 0.2
        pairs = httpx.get(
            f"{service.url}/api/v1/jobs/{preferred.id.replace('ftjob', 'job')}/metrics",
            headers={"Authorization": f"Bearer {service.key}"},
            timeout=60,
        ).json()
        assert pairs[-1]["loss"] < pairs[0]["loss"] and pairs[-1]["accuracy"] == 1
        done = client.fine_tuning.jobs.retrieve(graded.id)
        assert done.fine_tuned_model is not None
        assert client.models.delete(done.fine_tuned_model).deleted
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(done.fine_tuned_model)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": "nobodys"}, "model"),
    ({"training_file": "file-1"}, "training_file"),
    ({"validation_file": "file-" + "0" * 64}, "validation_file"),
    ({"method": {"type": "dpo"}}, "training_file"),
    ({"method": {"type": "supervised", "dpo": {}}}, "method.dpo"),
    ({"method": {"type": "reinforcement"}}, "method.reinforcement"),
    ({"method": {"type": "reinforcement", "reinforcement": {"grader": {"type": "python", "source": ""}}}},
     "method.reinforcement.grader.source"),
    ({"method": {"type": "reinforcement", "reinforcement": {"grader": {"type": "endpoint", "url": "http://x"}}}},
     "method.reinforcement.grader.type"),
    ({"method": {"type": "reinforcement", "reinforcement": {"grader": {
        "type": "score_model", "model": "nobodys", "input": [{"role": "user", "content": "x"}]}}}},
     "method.reinforcement.grader.model"),
    ({"method": {"type": "reinforcement", "reinforcement": {"grader": {**GRADER, "calculate_output": "x"}}}},
     "method.reinforcement.grader"),
    ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
    ({"hyperparameters": {"batch_size": "many"}}, "hyperparameters.batch_size"),
    ({"suffix": "a b"}, "suffix"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"integrations": [{"type": "wandb", "wandb": {"project": "p"}}]}, "integrations"),
    ({"response_format": {}}, "response_format"),
]  # fmt: skip


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_a_paused_job_survives_a_kill_and_mistakes_name_their_argument(tmp_path: Path) -> None:
    port = free_port()
    environment = {
        **os.environ, "ROOKERY_DATA": str(tmp_path / "data"), "ROOKERY_PORT": str(port), "ROOKERY_MODELS": MODEL,
        "ROOKERY_WORKERS": "1",
    }  # fmt: skip

    def start() -> tuple[subprocess.Popen[bytes], openai.OpenAI]:
        process = subprocess.Popen(
            [sys.executable, "-m", "rookery.cli", "serve"], env=environment, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        key = until(lambda: read_secret(tmp_path / "data", ADMIN_KEY_FILE), patience=SECONDS)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0)

        def ready() -> bool:
            try:
                return bool(client.files.list() is not None)
            except openai.OpenAIError:
                return False

        until(ready, patience=SECONDS)
        return process, client

    process, client = start()
    try:
        rows = upload(client, demonstrations())
        for changes, param in REFUSED:
            asked = {"model": MODEL, "training_file": rows, **changes}
            with pytest.raises(openai.BadRequestError) as refused:
                client.post("/fine_tuning/jobs", body=asked, cast_to=object)
            body: Any = refused.value.body
            assert body["param"] == param and "\n" not in body["message"], (changes, body)
        assert list(client.fine_tuning.jobs.list()) == []
        job = client.fine_tuning.jobs.create(
            model=MODEL, training_file=rows, method={
                "type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 4}},
            },
        ).id  # fmt: skip
        until(lambda: any(one.type == "metrics" for one in client.fine_tuning.jobs.list_events(job)), patience=SECONDS)
        assert client.fine_tuning.jobs.pause(job).status in ("paused", "running")
        until(lambda: client.fine_tuning.jobs.retrieve(job).status == "paused", patience=SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process, client = start()
        assert client.fine_tuning.jobs.retrieve(job).status == "paused"
        client.fine_tuning.jobs.resume(job)
        found = ended(client, job)
        assert found.status == "succeeded", found
        steps = [one.data for one in client.fine_tuning.jobs.list_events(job) if one.type == "metrics"]
        assert [step["step"] for step in steps] == [6, 5, 4, 3, 2, 1]  # type: ignore[index]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


JUDGE: dict[str, Any] = {
    "type": "score_model", "name": "judge", "model": MODEL, "range": [0, 1],
    "input": [{"role": "user", "content": "Rate from 0 to 1 how polite this is: {{ sample.output_text }}"}],
    "sampling_params": {"max_completions_tokens": 24, "temperature": 0},
}  # fmt: skip
LABEL: dict[str, Any] = {
    "type": "label_model", "name": "label", "model": MODEL, "labels": ["yes", "no"], "passing_labels": ["yes", "no"],
    "input": [{"role": "developer", "content": "Answer yes or no."}, {"role": "user", "content": [
        {"type": "input_text", "text": "Is {{ item.answer }} polite?"}]}],
}  # fmt: skip


def python(source: str) -> dict[str, Any]:
    return {"type": "python", "name": "python", "source": source}


SHORT = "def grade(sample, item):\n    return 1 / (1 + len(sample['output_text'].split()))"
RUNNING = {
    "type": "multi", "name": "all",
    "graders": {"short": python(SHORT), "judge": JUDGE, "label": LABEL},
    "calculate_output": "short + 0.1 * judge * label",
}  # fmt: skip

INVALID: list[tuple[dict[str, Any], str]] = [
    (python("x = 1"), "grader.source"),
    (python("def grade(sample): return 1"), "grader.source"),
    (python("async def grade(sample, item): return 1"), "grader.source"),
    (python("def grade(sample, item) return 1"), "grader.source"),
    (python("while True: pass"), "grader.source"),
    ({**python(SHORT), "image_tag": "2025-05-08"}, "grader.image_tag"),
    ({**JUDGE, "model": "nobodys"}, "grader.model"),
    ({**JUDGE, "input": [{"role": "user", "content": "{{ nothing }}"}]}, "grader"),
    ({**JUDGE, "input": [{"role": "tool", "content": "x"}]}, "grader.input.0.role"),
    ({**JUDGE, "range": [1, 0]}, "grader.range"),
    ({**LABEL, "passing_labels": ["maybe"]}, "grader"),
    ({**RUNNING, "graders": {"both": RUNNING}}, "grader.graders.both.type"),
    ({**RUNNING, "calculate_output": "short + none"}, "grader"),
]


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_graders_that_run_python_and_models_are_tried_and_train(tmp_path: Path) -> None:
    settings = Settings.load(data=tmp_path / "data", port=0, models=MODEL)
    with EmbeddedService(settings) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)
        until(lambda: any(one.id == MODEL for one in client.models.list()), patience=SECONDS)
        trials: Any = client.fine_tuning.alpha.graders

        def run(grader: dict[str, Any], sample: str = "two words", item: Any = None) -> Any:
            return trials.run(grader=grader, model_sample=sample, item=item or {"answer": "thanks"})

        for grader in (python(SHORT), JUDGE, LABEL, RUNNING):
            assert trials.validate(grader=grader).to_dict()["grader"] == grader
            tried = run(grader)
            errors = tried.metadata.errors.to_dict()
            assert not any(value for value in errors.values()), errors
            assert tried.metadata.type == grader["type"]
        assert run(python(SHORT)).reward == pytest.approx(1 / 3)
        assert run(python(SHORT), "<think>many words more</think>two words").reward == pytest.approx(1 / 3)
        assert run(LABEL).reward == 1
        tried = run(RUNNING)
        assert set(tried.sub_rewards) == {"short", "judge", "label"}
        assert tried.sub_rewards["short"] == pytest.approx(1 / 3)
        used = tried.model_grader_token_usage_per_model[MODEL]
        assert used["prompt_tokens"] > 20 and used["completion_tokens"] > 4
        for grader, param in INVALID:
            with pytest.raises(openai.BadRequestError) as refused:
                trials.validate(grader=grader)
            body: Any = refused.value.body
            assert body["param"] == param and "\n" not in body["message"], (grader, body)
        for source, said in (
            ("return float('nan')", "nan"), ("return None", "None"), ("return 1 / 0", "ZeroDivisionError"),
            ("while True: print('x' * 9999)", "more than the limit"), ("while True: pass", "time limit"),
            ("open('/etc/passwd')", "FileNotFoundError"), ("__import__('os').fork()", "PermissionError"),
            ("__import__('socket').socket()", "PermissionError"),
        ):  # fmt: skip
            tried = run(python(f"def grade(sample, item):\n    {source}"))
            errors = tried.metadata.errors
            assert tried.reward == 0 and errors.python_grader_runtime_error, source
            assert said in errors.python_grader_runtime_error_details, errors
        assert run(python("x = 1")).metadata.errors.python_grader_runtime_error
        assert run({**JUDGE, "model": "nobodys"}).metadata.errors.model_grader_server_error
        graded = reinforced(client, RUNNING)
        found = ended(client, graded.id)
        assert found.status == "succeeded", found
        rows = httpx.get(
            f"{service.url}/api/v1/jobs/{graded.id.replace('ftjob', 'job')}/metrics",
            headers={"Authorization": f"Bearer {service.key}"},
            timeout=60,
        ).json()
        assert {f"reward/{name}" for name in ("short", "judge", "label", "grader")} <= set(rows[-1]), rows[-1]
        assert rows[-1]["reward/unjudged"] == 0
