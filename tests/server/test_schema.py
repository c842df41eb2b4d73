"""No request makes the service answer with 5xx, or otherwise than its OpenAPI document says: requests that the document
allows and that it does not, and odd JSON to the OpenAI API, with the key of an administrator, of a tenant, and none.

``make fuzz`` sends more of them, and other ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tests.support.draws import MORE, examples
from tests.support.faces import MODEL, ThreadedWorker, served

from rookery.server.app import build
from rookery.server.launcher import EmbeddedService

EXAMPLES = examples(2)
"""Requests per operation and key. They are the same ones in each run, so few are enough: `make fuzz` sends 200 new
ones."""

quick = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=not MORE, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)  # fmt: skip


@schemathesis.serializer("application/jsonl", "application/x-tar")
def as_it_is(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


DOCUMENT = build(None).openapi()  # type: ignore[arg-type]  # nothing is served by this one
OPERATIONS = {found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedService, dict[str, dict[str, str]]]]:
    """A service and the headers of each caller."""
    root = tmp_path_factory.mktemp("fuzzed")
    with served(root, tenant_requests_per_second=1e9, failed_keys_per_minute=10**9) as service:
        admin = {"Authorization": f"Bearer {service.key}"}
        worker = ThreadedWorker.of(service)
        with httpx.Client(base_url=service.url, headers=admin, timeout=60) as http, worker:
            id = http.post("/api/v1/tenants", json={"name": "ada"}).json()["id"]
            key = http.post(f"/api/v1/tenants/{id}/keys", json={}).json()["key"]
            yield service, {"admin": admin, "tenant": {"X-API-Key": key}, "nobody": {}}


@pytest.mark.parametrize("label", OPERATIONS)
def test_operation_answers_as_documented(fuzzed: Any, label: str) -> None:
    service, headers = fuzzed

    @quick
    @given(case=OPERATIONS[label].as_strategy())
    def answers(case: schemathesis.Case) -> None:
        for who in ("admin", "tenant"):
            case.call_and_validate(
                base_url=service.url, headers=headers[who], excluded_checks=[positive_data_acceptance], timeout=60
            )

    answers()


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=())),
    st.sampled_from([10**400, -(2**63) - 1, 1e-320, float("inf"), MODEL, "user", [MODEL] * 300, {"type": "text"}]),
)  # fmt: skip
"""Values of JSON as Python writes them: also numbers that are none, halves of characters, and numbers of any size."""

NESTED = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
DEEP = "<deep>"
"""Stands for a value that is nested too deep to be written by :mod:`json`."""

FIELDS = (
    "model", "messages", "prompt", "n", "temperature", "max_tokens", "max_completion_tokens", "seed", "stop", "stream",
    "stream_options", "return_token_ids", "logprobs", "best_of", "top_p", "tools", "logit_bias", "response_format",
)  # fmt: skip
"""The fields of the OpenAI API's requests, supported or not."""


@pytest.mark.parametrize("who", ["tenant", "nobody"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models/{}"])
def test_odd_requests_of_the_openai_api_get_its_errors(fuzzed: Any, path: str, who: str) -> None:
    service, headers = fuzzed
    usual = {"model": MODEL, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    del usual["messages" if path == "/v1/completions" else "prompt"]
    odd = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), NESTED | st.just(DEEP), max_size=3)

    with httpx.Client(base_url=service.url, headers=headers[who], timeout=60) as http:

        @settings(quick, max_examples=examples(8) * EXAMPLES)
        @given(changes=odd, whole=NESTED, name=st.text(max_size=40), depth=st.integers(60, 3000))
        def answers(changes: dict[str, Any], whole: Any, name: str, depth: int) -> None:
            if "{}" in path:
                response = http.get(path.format(quote(name)))
            else:
                body = json.dumps({**usual, **changes} if changes else whole)
                body = body.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
                response = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code < 500, response.text
            if response.status_code != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            # 404: a name that makes another path, which is none
            assert who == "tenant" or response.status_code in ((401, 404) if "{}" in path else (401,))

        answers()


def test_a_refused_method_lists_the_methods_of_the_path(fuzzed: Any) -> None:
    service, headers = fuzzed
    paths = {re.sub(r"{\w+}", "x", path): path for path in DOCUMENT["paths"]}
    with httpx.Client(base_url=service.url, headers=headers["admin"], timeout=60) as http:
        for url in paths:
            fitting = [path for path in paths.values() if re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), url)]
            if url in fitting:  # a path without parameters is itself, never a value of another path's parameter
                fitting = [url]
            allowed = {method.upper() for path in fitting for method in DOCUMENT["paths"][path]}
            for method in {"DELETE", "GET", "PATCH", "POST", "PUT"} - allowed:
                response = http.request(method, url)
                assert response.status_code == 405, (method, url)
                assert set(response.headers["allow"].split(", ")) == allowed, (method, url)
