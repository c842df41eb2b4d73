"""The dashboard and the alert rules name metrics that the service exports, with the labels that it gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from tests.support.faces import ThreadedWorker, job, served
from tests.support.waiting import until

from rookery.client import Client

DEPLOY = Path(__file__).parent.parent / "deploy"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The text of a scrape, with a worker and a job that has ended."""
    with (
        served(tmp_path_factory.mktemp("scrape")) as service,
        ThreadedWorker.of(service),
        Client(service.url, service.key) as client,
    ):
        client.submit(job(stop={"steps": 1})).wait()
        until(lambda: [worker for worker in client.workers() if worker.beat])
        yield httpx.get(f"{service.url}/metrics", timeout=60).text


def expressions() -> dict[str, list[str]]:
    panels = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    found = {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels}
    rules = [rule for group in groups for rule in group["rules"]]
    assert all(rule["annotations"]["summary"] for rule in rules)
    return found | {rule["alert"]: [rule["expr"]] for rule in rules}


@pytest.mark.parametrize("name", expressions())
def test_every_metric_is_exported(exported: str, name: str) -> None:
    known = set(re.findall(r"^(\w+)[ {]", exported, re.MULTILINE))
    for expression in expressions()[name]:
        wanted = set(re.findall(r"\b(?:rookery|process)_\w+", expression))
        assert wanted <= known, (expression, wanted - known)
        assert wanted or "up{" in expression
        assert expression.count("(") == expression.count(")")
        for counter in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert counter.endswith("_total"), counter


def test_panels_have_units_and_words_and_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) and len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
