"""Usage as JSON and CSV, and the health of a job over HTTP."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import httpx
from tests.support.faces import ThreadedWorker, job, served, tokenizer

from rookery.client import Client


def test_usage_of_jobs_is_the_same_as_json_and_csv(tmp_path: Path) -> None:
    with served(tmp_path) as service, ThreadedWorker.of(service), Client(service.url, service.key) as client:
        for name in ("first", "second"):
            assert client.submit(job(name=name)).wait().state == "completed"
        last = client.submit(job(name="third", environment={"hosted": "none"})).cancel()
        headers = {"Authorization": f"Bearer {service.key}"}
        with httpx.Client(base_url=f"{service.url}/api/v1", headers=headers, timeout=60) as http:
            found = http.get("/usage").json()
            assert found["total"] == 3 and [one["name"] for one in found["jobs"]] == ["third", "second", "first"]
            assert found["jobs"][1]["tokens"] == client.job("second").show().tokens > 0
            rows = list(csv.DictReader(io.StringIO(http.get("/usage.csv").text)))
            assert [row["name"] for row in rows] == ["first", "second", "third"]
            assert [row["job"] for row in rows][2] == last.id
            assert rows[0]["finished"] >= rows[0]["created"]  # to the second
            health = http.get("/jobs/first/health").json()
            assert health["alarms"] == [] and isinstance(health["advice"], list)


def test_alarms_of_a_job_are_served(tmp_path: Path) -> None:
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
        with ThreadedWorker(service.url, token, tokenizer(tmp_path), ("four", "five")):
            made = client.submit(job(stop={"steps": 4}))
            assert made.wait().state == "completed"
        (alarm,) = made.health().alarms
        assert alarm.name == "dead reward" and "mean reward 0" in alarm.problem
