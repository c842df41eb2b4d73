"""Clients for Azure: the unmodified ``AzureOpenAI`` client, and requests as Azure's own manual shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai import AzureOpenAI, OpenAI
from tests.support.faces import MODEL, ThreadedWorker, served
from tests.support.waiting import until

from rookery.clock import RandomIds, SystemClock
from rookery.server.completion_formats import ChatFormat, TextFormat
from rookery.server.launcher import EmbeddedService
from rookery.server.openai import ChatRequest, CompletionRequest
from rookery.server.routes.azure import DeployedChat, DeployedCompletion

HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]
VERSION = "2024-10-21"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("azure")) as service, ThreadedWorker.of(service):
        with OpenAI(base_url=f"{service.url}/v1", api_key=service.key) as plain:
            until(lambda: any(model.id == MODEL for model in plain.models.list()))
        yield service


def azure(service: EmbeddedService, **options: Any) -> AzureOpenAI:
    given = {"azure_endpoint": service.url, "api_key": service.key, "api_version": VERSION, "max_retries": 0}
    return AzureOpenAI(**{**given, **options})


def test_completions_are_those_of_the_plain_client(service: EmbeddedService) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 7}
    written: dict[str, Any] = {"model": MODEL, "prompt": "Once", "seed": 7}
    with OpenAI(base_url=f"{service.url}/v1", api_key=service.key) as plain, azure(service) as client:
        expected = plain.chat.completions.create(**asked).choices[0].message.content
        assert expected and client.chat.completions.create(**asked).choices[0].message.content == expected
        chunks = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
        text = plain.completions.create(**written).choices[0].text
        assert text and client.completions.create(**written).choices[0].text == text
        response = plain.responses.create(model=MODEL, input="Hello?", extra_body={"seed": 7})
        assert client.responses.create(model=MODEL, input="Hello?", extra_body={"seed": 7}).output_text == (
            response.output_text
        )
        count = plain.responses.input_tokens.count(model=MODEL, input="Hello?").input_tokens
        assert count and client.responses.input_tokens.count(model=MODEL, input="Hello?").input_tokens == count
        assert [model.id for model in client.models.list()] == [model.id for model in plain.models.list()]
        assert not list(client.files.list()) and not list(client.fine_tuning.jobs.list())
    with OpenAI(base_url=f"{service.url}/openai/v1", api_key=service.key) as newer:
        assert newer.chat.completions.create(**asked).choices[0].message.content == expected


@pytest.mark.parametrize(
    ("asked", "form", "kinds"),
    [
        ({"messages": HELLO}, ChatFormat, (ChatRequest, DeployedChat)),
        ({"prompt": "Once"}, TextFormat, (CompletionRequest, DeployedCompletion)),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
def test_a_stream_for_azure_waits_without_comments(asked: Any, form: Any, kinds: Any, more: Any) -> None:
    """azure-ai-inference raises at a line that is no data, and skips a chunk without choices and usage."""
    context = SimpleNamespace(context=SimpleNamespace(ids=RandomIds(), clock=SystemClock()))
    plain, deployed = (
        form(context, kind.model_validate({"model": "m", "stream": True, **asked, **more}), "m", logprobs=False,
             trainable=True).heartbeat()
        for kind in kinds
    )  # fmt: skip
    assert plain.startswith(b":") and plain.endswith(b"\n\n")
    line, *rest = deployed.splitlines()
    chunk = json.loads(line.removeprefix(b"data: "))
    assert rest == [b""] and chunk["choices"] == [] and chunk.get("usage") is None


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": "gpt-4o"}])
def test_the_address_names_the_model(service: EmbeddedService, body: dict[str, Any]) -> None:
    url, headers = f"{service.url}/openai/deployments/{MODEL}", {"api-key": service.key}
    for path, asked in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "Once"})):
        answer = httpx.post(f"{url}/{path}?api-version={VERSION}", headers=headers, json={**asked, **body}, timeout=60)
        assert answer.raise_for_status().json()["model"] == MODEL
    with azure(service, azure_deployment=MODEL) as client:
        assert client.chat.completions.create(model="gpt-4o", messages=HELLO).model == MODEL


@pytest.mark.parametrize("model", ["nothing", "some/folder", "JOB@7", "ft:a:b:c:d"])
def test_a_name_of_any_form_reaches_the_model(service: EmbeddedService, model: str) -> None:
    with azure(service) as client, pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model=model, messages=HELLO)
    assert refused.value.code == "model_not_found" and model.partition("@")[0] in refused.value.message


def test_refusals_have_openais_format(service: EmbeddedService) -> None:
    with azure(service, api_key="tml-wrong") as other, pytest.raises(openai.AuthenticationError):
        other.chat.completions.create(model=MODEL, messages=HELLO)
    with azure(service) as client:
        with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
            client.embeddings.create(model=MODEL, input="x")
        with pytest.raises(openai.NotFoundError, match="the models here read and write text alone"):
            client.images.generate(model=MODEL, prompt="x")
        with pytest.raises(openai.BadRequestError, match="no_such_field") as refused:
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"no_such_field": 1})
        assert refused.value.param == "no_such_field"
    headers = {"api-key": service.key}
    for method, path, status in (
        ("GET", f"deployments/{MODEL}/chat/completions", 405),
        ("GET", "deployments", 404),
        ("GET", "nothing", 404),
        ("DELETE", "models", 405),
    ):
        answer = httpx.request(method, f"{service.url}/openai/{path}", headers=headers, timeout=60)
        assert answer.status_code == status and answer.json()["error"]["message"], answer.text
