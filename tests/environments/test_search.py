"""The tool ``search``: a corpus, the queries of a policy, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.faces import ThreadedWorker, job, served, tokenizer

from rookery.client import Client
from rookery.environments.base import Reply, Step
from rookery.environments.builtins import find
from rookery.environments.search import SearchIndex, texts_of
from rookery.environments.tools import SearchTool
from rookery.errors import UserError

pytest.importorskip("bm25s", reason="needs the search extra")

EXAMPLE = Path(__file__).parents[2] / "examples" / "search.yaml"
CORPUS = EXAMPLE.with_name("places.jsonl")
ROW = {"prompt": "How deep is Lake Orsa?", "answer": 312}


@pytest.fixture(scope="module")
def index() -> SearchIndex:
    return SearchIndex(str(CORPUS))


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("lighthouse Dunmore", "Dunmore\nThe lighthouse"), ("WHO was born in Tolsta?", "Ida Renn\nIda Renn was born"),
        ("deep lake", "Orsa\nLake Orsa"), ("kerr", "Kerr\nMount Kerr"),
    ],
)  # fmt: skip
def test_the_text_that_fits_best_comes_first(index: SearchIndex, query: str, first: str) -> None:
    found = index.find(query, 3)
    assert 1 <= len(found) <= 3 and found[0].startswith(first)
    assert found == index.find(query, 3)


@pytest.mark.parametrize("query", ["", "   ", "?!", "zyzzyva", "\0", "\ud800", "a" * 100_000, "</search>", "é ü 雨"])
def test_a_query_without_known_words_finds_nothing(index: SearchIndex, query: str) -> None:
    assert index.find(query, 3) == []


def test_more_results_than_texts_are_all_that_fit(index: SearchIndex) -> None:
    assert 0 < len(index.find("the of in was is", 1000)) <= 12


def test_each_text_is_cut_before_the_result_is() -> None:
    tool = SearchTool.model_validate({"tool": "search", "index": str(CORPUS), "results": 20, "result_chars": 30})
    assert [len(text) for text in tool.call("the of in was is").split("\n\n")] == [10, 10, 6]


def test_an_episode_searches_and_answers() -> None:
    tools = [{"tool": "search", "index": str(CORPUS), "results": 1}]
    environment = find("jsonl")({"rows": [ROW], "verifier": "number", "tools": tools})
    episode: Any = environment.for_episode()
    episode.prompt = ROW
    [first] = episode.reset(ROW, 0)
    assert "<search>words</search>" in first["content"]
    steps: list[Step] = [episode.step(Reply(text, [], [], turn)) for turn, text in enumerate(
        ["<search>Lake Orsa deep", "<search>nothing-like-it</search>", "It is 312."]
    )]  # fmt: skip
    assert "Lake Orsa is 312 metres deep." in steps[0].messages[0]["content"]
    assert "(nothing found)" in steps[1].messages[0]["content"]
    assert steps[2].done and steps[2].reward == 1 and steps[2].metrics["calls"] == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": ""}', "text is"), ('{"title": "a"}', "text is"), ('{"text": 3}', "text is 3"),
        ("[]", "not an object"),
        ('{"text": "a", "title": 3}', "title is 3"), ("x", "not JSON"), ("", "no rows"),
    ],
)  # fmt: skip
def test_a_corpus_with_a_row_that_is_no_text_is_refused(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match=said):
        list(texts_of(file))
    with pytest.raises(UserError, match=said):
        find("jsonl")({"rows": [ROW], "verifier": "number", "tools": [{"tool": "search", "index": str(file)}]})


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"tool": "search"}, r"tools\.0\.index"), ({"tool": "searching", "index": "x"}, "one of python, search"),
        ({"tool": "search", "index": "x", "results": 0}, r"tools\.0\.results"), ("search", "a mapping of fields"),
    ],
)  # fmt: skip
def test_a_tool_with_wrong_options_is_refused(tool: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find("jsonl").check({"rows": [ROW], "verifier": "number", "tools": [tool]})


@pytest.mark.timeout(300)
def test_a_job_searches_an_uploaded_corpus_of_its_tenant(tmp_path: Path) -> None:
    spec = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
        asked = {**job(), "environment": {**spec["environment"], "eval_last": 0}, "sampling": {"max_tokens": 60}}
        with ThreadedWorker(service.url, token, tokenizer(tmp_path), ("<search>Castor Ida Renn</search>", "none")):
            made = client.submit(asked, folder=EXAMPLE.parent)
            assert made.wait(timeout=250).state == "completed"
            rows = list(made.metrics(follow=False))
            shown = [made.episode(row.episode) for row in made.episodes()]
        assert any(row["reward/calls"] > 0 for row in rows), rows
        assert "was built by Ida Renn" in json.dumps(shown)
        for index, said in (("0" * 64, "no corpus"), (str(CORPUS), "no corpus"), ("/etc/passwd", "no corpus")):
            tool = {"tool": "search", "index": index}
            environment = {"id": "jsonl", "rows": [ROW] * 4, "verifier": "number", "tools": [tool]}
            answer = httpx.post(
                f"{service.url}/api/v1/jobs", json=job(environment=environment), timeout=60,
                headers={"Authorization": f"Bearer {service.key}"},
            )  # fmt: skip
            assert answer.status_code == 422 and said in answer.text, answer.text
