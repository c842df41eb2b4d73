"""The page on the Tinker API: its loop runs, and what it trained answers a chat."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from tests.support.tinkered import MODEL

from rookery.server.launcher import EmbeddedService

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def test_loop_and_chat_of_the_docs_page(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text(encoding="utf-8").split("## Tinker")[1]
    loop, chat = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("TINKER_BASE_URL", f"{service.url}/tinker")
    monkeypatch.setenv("TINKER_API_KEY", service.key)
    names = {"service_key": service.key}
    loop = loop.replace("smollm2-135m-instruct", MODEL).replace("range(10)", "range(2)")
    exec(loop, names)  # the page's own code is what is tested
    exec(chat.replace("http://127.0.0.1:7077", service.url), names)
    said = capsys.readouterr().out.splitlines()
    assert len(said) >= 3
    client = openai.OpenAI(base_url=f"{service.url}/tinker/oai/api/v1", api_key=service.key)
    model = str(names["path"])
    question: list = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=4, seed=1)
    direct = openai.OpenAI(base_url=f"{service.url}/v1", api_key=service.key)
    again = direct.chat.completions.create(model=model, messages=question, max_tokens=4, seed=1)
    assert answer.choices[0].message.content == again.choices[0].message.content
    assert answer.model == model
    assert model in [found.id for found in direct.models.list()]
    assert direct.models.retrieve(model).id == model
    stream = list(direct.chat.completions.create(
        model=model, messages=question, max_tokens=4, seed=1, n=2, stream=True,
        stream_options={"include_usage": True},
    ))  # fmt: skip
    first = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices if choice.index == 0)
    assert first == answer.choices[0].message.content
    assert answer.usage is not None and stream[-1].usage is not None
    assert stream[-1].usage.prompt_tokens == answer.usage.prompt_tokens
    text = direct.completions.create(model=model, prompt="Hello", max_tokens=3, seed=1, logprobs=0)
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.token_logprobs or []) == 3
