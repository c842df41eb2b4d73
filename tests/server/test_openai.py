"""The OpenAI API tested with the real ``openai`` client: a real service, a real worker, a small random model."""

from __future__ import annotations

import asyncio
import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from tests.server.test_api import end_of
from tests.support.faces import MODEL, ThreadedWorker, job, served, tokenizer
from tests.support.peers import eventually
from tests.support.small_model import save_small_model
from tests.support.tiny import native_engine
from tests.support.waiting import until

from rookery import protocol
from rookery.server.launcher import EmbeddedService
from rookery.server.openai import ConversationMessage
from rookery.server.responses import event_data
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.tokenization.registry import model_folder
from rookery.worker.engine.native.runner import best_runner
from rookery.worker.model.adapter import read_adapter
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]


@dataclass
class Open:
    service: EmbeddedService
    client: OpenAI
    stranger: OpenAI
    http: httpx.Client
    base: str
    job: str
    folder: Path
    """The prepared model."""

    def chat(self, **asked: Any) -> Any:
        plain: dict[str, Any] = {"model": self.base, "messages": HELLO, "max_tokens": 24, "seed": 7}
        return self.client.chat.completions.create(**{**plain, **asked})

    def text(self, **asked: Any) -> Any:
        plain: dict[str, Any] = {"model": self.base, "prompt": "Once", "max_tokens": 24, "seed": 7}
        return self.client.completions.create(**{**plain, **asked})


@pytest.fixture(scope="module")
def face(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    root = tmp_path_factory.mktemp("openai")
    base = str(save_small_model(root / "small"))
    with served(root, models=base, workers=1, threads=1, flush_seconds=0.02, max_rows=8, answer_tokens=40) as service:

        def http(key: str) -> httpx.Client:
            return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

        def client(key: str) -> OpenAI:
            return OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)

        with http(service.key) as admin:
            tenant = admin.post("/api/v1/tenants", json={"name": "bob"}).json()
            key = admin.post(f"/api/v1/tenants/{tenant['id']}/keys", json={"label": "test"}).json()["key"]
            submitted = admin.post("/api/v1/jobs", json=job(
                base_model=base, stop={"steps": 1}, sampling={"max_tokens": 8},
                policies={"main": {"rank": 4, "targets": ["q", "v"], "optimizer": {"lr": 0.1}}},
                environment={"id": "jsonl", "rows": [{"prompt": "Say something."}],
                             "verifier": {"name": "regex", "pattern": "[A-Za-z]"}},
                algorithm={"group_size": 8, "groups_per_step": 2},
            )).json()  # fmt: skip
            _, done = end_of(admin, submitted["id"])
            assert done["state"] == "completed", done
            with client(service.key) as mine, client(key) as stranger:
                folder = model_folder(root / "cache", base)
                yield Open(service, mine, stranger, admin, base, done["id"], folder)


def joined(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice of a chat's stream; shapes are checked on the way."""
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in chunks:
        assert chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id
        for choice in chunk.choices:
            assert choice.index not in ended
            if choice.index not in texts:
                assert choice.delta.role == "assistant"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                ended.add(choice.index)
    assert ended == set(texts)
    return texts


# --- answers ----------------------------------------------------------------------------------------------------------


def test_chat_response_has_openais_format(face: Open) -> None:
    answer = face.chat()
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == face.base
    assert answer._request_id == answer.id
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == ("length" if answer.usage.completion_tokens == 24 else "stop")
    assert choice.logprobs is None
    chat = Chat.load(face.folder)
    assert answer.usage.prompt_tokens == len(chat.prompt(HELLO))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert "token_ids" not in choice.to_dict() and "prompt_token_ids" not in choice.to_dict()


def test_responses_are_of_the_sdks_types(face: Open) -> None:
    """The SDK takes anything, and attributes are absent; told to be strict, it refuses what is not of its types."""
    with OpenAI(
        base_url=f"{face.service.url}/v1", api_key=face.service.key, max_retries=0, _strict_response_validation=True
    ) as strict:
        chats, responses = strict.chat.completions, strict.responses
        scored: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
        include: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        for more in ({}, scored):
            assert chats.create(model=face.base, messages=HELLO, max_tokens=4, n=2, **more).usage
            usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
            assert list(chats.create(model=face.base, messages=HELLO, max_tokens=4, n=2, **usage, **more))
        assert strict.completions.create(model=face.base, prompt="x", max_tokens=4, logprobs=2).usage
        for more in ({}, include):
            assert responses.create(model=face.base, input="x", max_output_tokens=4, **more).usage
            assert list(responses.create(model=face.base, input="x", max_output_tokens=4, stream=True, **more))
        for model in strict.models.list():
            assert strict.models.retrieve(model.id) == model


def test_same_seed_gives_same_response_and_choices_differ(face: Open) -> None:
    four = face.chat(n=4, extra_body={"return_token_ids": True})
    texts = [choice.message.content for choice in four.choices]
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [choice.message.content for choice in face.chat(n=4).choices] == texts
    assert face.chat().choices[0].message.content == texts[0]
    assert face.chat(seed=8).choices[0].message.content != texts[0]
    assert face.chat(seed=None).choices[0].message.content != face.chat(seed=None).choices[0].message.content
    assert four.usage.prompt_tokens == face.chat().usage.prompt_tokens, "a prompt counts once"
    assert four.usage.completion_tokens == sum(len(choice.token_ids) for choice in four.choices)
    cold = face.chat(n=2, temperature=0, seed=None)
    assert cold.choices[0].message.content == cold.choices[1].message.content


def test_streamed_response_equals_the_whole_one(face: Open) -> None:
    """The model's bytes are mostly no UTF-8: nothing of a character is shown before the whole of it."""
    whole = face.chat(n=3, max_tokens=100)
    chunks = list(face.chat(n=3, max_tokens=100, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks[:-1]) == {choice.index: choice.message.content for choice in whole.choices}
    assert len(chunks) > 10, "it came in pieces"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert joined(list(face.chat(stream=True))) == {0: face.chat().choices[0].message.content}


def test_stream_ends_with_usage_and_done(face: Open) -> None:
    asked = {"model": face.base, "messages": HELLO, "max_tokens": 3, "stream": True}
    response = face.http.post("/v1/chat/completions", json=asked)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-1])


def test_proxies_are_asked_to_pass_events_on_as_they_come(face: Open) -> None:
    """By default nginx keeps them back until it has some kilobytes, and others compress them."""
    asked: dict[str, Any] = {"model": face.base, "stream": True}
    streams = [
        ("POST", "/v1/chat/completions", {**asked, "messages": HELLO, "max_tokens": 2}),
        ("POST", "/v1/completions", {**asked, "prompt": "x", "max_tokens": 2}),
        ("POST", "/v1/responses", {**asked, "input": "x", "max_output_tokens": 2}),
        ("GET", f"/api/v1/jobs/{face.job}/metrics/stream", None),
    ]
    for method, path, body in streams:
        response = face.http.request(method, path, json=body).raise_for_status()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no", path
        assert response.headers["cache-control"] == "no-store, no-transform", path


@given(st.text() | st.text("ab\x85\u2028\u2029"))
def test_an_event_is_one_line_to_every_client(text: str) -> None:
    """Also to those that end lines where ``str.splitlines`` does, as httpx."""
    line, end = event_data(msgspec.json.encode(text)).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == text and end == ""


async def test_async_client_runs_many_streams_at_once(face: Open) -> None:
    async with AsyncOpenAI(base_url=f"{face.service.url}/v1", api_key=face.service.key, max_retries=0) as client:

        async def talk(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=face.base, messages=HELLO, max_tokens=16, seed=seed, stream=True
            )
            return joined([chunk async for chunk in stream])[0]

        texts = await asyncio.gather(*(talk(seed) for seed in range(12)))
    assert texts[7] == face.chat(max_tokens=16).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_text_ends_before_the_stop_string(face: Open, stream: bool) -> None:
    text = face.text(max_tokens=60).choices[0].text
    stop = text[20:23]
    expected = text[: text.index(stop)]
    for stops in (stop, ["never this", stop]):
        answer = face.text(max_tokens=60, stop=stops, stream=stream)
        pieces = [choice for part in (answer if stream else [answer]) for choice in part.choices]
        assert "".join(piece.text for piece in pieces) == expected
        assert pieces[-1].finish_reason == "stop"


def test_partial_stop_string_is_sent_when_it_does_not_complete(face: Open) -> None:
    text = face.text().choices[0].text
    stops = [text[:2] + "…", text[-1] + "…"]
    parts = [choice.text for chunk in face.text(stop=stops, stream=True) for choice in chunk.choices]
    assert "".join(parts) == text


def test_default_token_limit_is_a_setting(face: Open) -> None:
    assert face.chat(max_tokens=None).usage.completion_tokens == 40
    assert face.chat(max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5
    assert face.text(max_tokens=None).usage.completion_tokens == 16, "OpenAI's own"


def test_prompts_may_be_lists_and_token_ids(face: Open) -> None:
    chat = Chat.load(face.folder)
    both = face.text(prompt=["Once", "Twice"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == face.text().choices[0].text == face.text(prompt=chat.encode("Once")).choices[0].text
    ids = face.text(prompt=[chat.encode("Once"), chat.encode("Twice")], n=2)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in both.choices]
    assert both.usage.prompt_tokens == len("OnceTwice")


def test_message_content_may_be_text_parts(face: Open) -> None:
    plain: list[Any] = [{"role": "system", "content": "Be brief."}, *HELLO, {"role": "assistant", "content": "Hi."},
                        {"role": "user", "content": "And now?"}]  # fmt: skip
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *HELLO,
        openai.types.chat.ChatCompletionMessage(role="assistant", content="Hi.").model_dump(),
        plain[3],
    ]
    answers = [face.chat(messages=m, extra_body={"return_token_ids": True}) for m in (plain, parts)]
    assert answers[0].choices[0].prompt_token_ids == Chat.load(face.folder).prompt(plain)
    assert answers[0].choices[0].to_dict() == answers[1].choices[0].to_dict()


def test_examples_of_the_serving_page_run(face: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second example continues the first."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8").split("## Tinker")[0]
    monkeypatch.setenv("OPENAI_BASE_URL", f"{face.service.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", face.service.key)
    names: dict[str, Any] = {}
    for example in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(compile(example.replace("JOB", face.job), "docs/serving.md", "exec"), names)
    assert names["choice"].token_ids


# --- log-probs and token ids ------------------------------------------------------------------------------------------


def alone(face: Open, prompt: list[int], seed: int, adapter: Path | None = None) -> tuple[list[int], list[float]]:
    """The text that the engine alone samples."""
    decoder = Decoder.load(face.folder)
    chat = Chat.load(face.folder)
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    ref = None
    if adapter is not None:
        loras.add("a", read_adapter(adapter, decoder.config))
        ref = protocol.AdapterRef(policy="p", version=1, hash="a", rank=4, alpha=8.0)
    runner = best_runner(decoder, loras, 1 << 26, compiled=Settings().engine.cpu_kernels)  # as in a worker
    engine = native_engine(decoder, loras, chat.decode, max_rows=4, kv_budget_bytes=1 << 26, runner=runner)
    engine.submit(protocol.Generate(request="r", adapter=ref, prompt=prompt, shared_prefix=len(prompt), max_tokens=24,
                                temperature=1.0, seed=seed, stop_tokens=chat.stop_tokens))  # fmt: skip
    while engine.step():
        pass
    (chunk,) = engine.drain()
    return chunk.tokens, chunk.logprobs


def test_token_ids_and_logprobs_match_the_engine(face: Open) -> None:
    choice = face.chat(extra_body={"return_token_ids": True}, logprobs=True).choices[0]
    assert choice.prompt_token_ids == Chat.load(face.folder).prompt(HELLO)
    assert (choice.token_ids, choice.token_logprobs) == alone(face, choice.prompt_token_ids, 7)
    assert choice.token_versions == [0] * len(choice.token_ids)
    assert [entry.logprob for entry in choice.logprobs.content] == choice.token_logprobs
    said = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert said.decode(errors="replace") == choice.message.content
    assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)


def test_policy_responses_use_its_adapter_and_name_its_version(face: Open, tmp_path: Path) -> None:
    answers = {name: face.chat(model=name, extra_body={"return_token_ids": True})
               for name in (face.base, f"{face.job}@0", f"{face.job}@1", face.job, f"{face.job}:latest")}  # fmt: skip
    assert [answer.model for answer in answers.values()] == [
        face.base, f"{face.job}@0", f"{face.job}@1", f"{face.job}@1", f"{face.job}@1",
    ]  # fmt: skip
    ids = {name: answer.choices[0].token_ids for name, answer in answers.items()}
    assert ids[f"{face.job}@0"] == ids[face.base], "version 0 is the untrained adapter"
    assert ids[f"{face.job}@1"] == ids[face.job] == ids[f"{face.job}:latest"] != ids[face.base]
    assert answers[face.job].choices[0].token_versions == [1] * len(ids[face.job])
    archive = face.http.get(f"/api/v1/jobs/{face.job}/policies/main/versions/1/adapter").content
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tmp_path, filter="data")
    choice = answers[face.job].choices[0]
    assert (choice.token_ids, choice.token_logprobs) == alone(face, choice.prompt_token_ids, 7, tmp_path)


@pytest.mark.parametrize(
    "asked",
    [
        {"top_p": 0.5}, {"extra_body": {"top_k": 2}}, {"extra_body": {"min_p": 0.5}}, {"frequency_penalty": -2},
        {"presence_penalty": -2}, {"extra_body": {"repetition_penalty": 0.5}}, {"logit_bias": {"40": 30, "41": 30}},
    ],
    ids=str,
)  # fmt: skip
def test_changed_distributions_are_sampled_and_marked_as_not_trainable(face: Open, asked: dict[str, Any]) -> None:
    plain, changed = face.chat(max_tokens=120), face.chat(**asked, max_tokens=120)
    assert "trainable" not in plain.to_dict() and changed.to_dict()["trainable"] is False
    assert plain.choices[0].message.content != changed.choices[0].message.content
    chunks = list(face.chat(**asked, max_tokens=120, stream=True))
    assert joined(chunks)[0] == changed.choices[0].message.content
    assert all(chunk.to_dict()["trainable"] is False for chunk in chunks)


def test_likeliest_tokens_come_with_log_probabilities(face: Open) -> None:
    answer = face.chat(logprobs=True, top_logprobs=4)
    entries = answer.choices[0].logprobs.content
    assert entries and answer.choices[0].message.content == face.chat().choices[0].message.content
    for entry in entries:
        likeliest = [other.logprob for other in entry.top_logprobs]
        assert len(likeliest) == 4 and likeliest == sorted(likeliest, reverse=True)
        assert entry.logprob <= likeliest[0] + 1e-4
        assert all(abs(o.logprob - entry.logprob) < 1e-4 for o in entry.top_logprobs if o.bytes == entry.bytes)
    streamed = [
        entry
        for chunk in face.chat(logprobs=True, top_logprobs=4, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == entries
    lines = face.text(logprobs=2).choices[0].logprobs
    for token, logprob, line in zip(lines.tokens, lines.token_logprobs, lines.top_logprobs, strict=True):
        assert line[token] == pytest.approx(logprob, abs=1e-4) and len(line) in (2, 3)


def test_echo_scores_the_prompt_as_the_engine_samples_it(face: Open) -> None:
    prompt = [*Chat.load(face.folder).prompt(HELLO)]
    sampled = face.text(prompt=prompt, logprobs=0, max_tokens=12, extra_body={"return_token_ids": True}).choices[0]
    whole = face.text(prompt=[*prompt, *sampled.token_ids], echo=True, logprobs=1, max_tokens=0, temperature=0)
    scored, tokens = whole.choices[0].logprobs, len(prompt) + len(sampled.token_ids)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (0, "length")
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs) == tokens
    assert scored.token_logprobs[len(prompt) :] == pytest.approx(sampled.token_logprobs, abs=0.05)
    assert whole.choices[0].text.startswith("".join(scored.tokens[: len(prompt)]))
    for at, token in zip(scored.text_offset[: len(prompt)], scored.tokens, strict=False):
        assert whole.choices[0].text[at:].startswith(token)
    one = face.text(prompt="Once upon", echo=True, logprobs=1, max_tokens=1, temperature=0)
    assert one.choices[0].text.startswith("Once upon") and len(one.choices[0].logprobs.tokens) == 10
    plain = face.text(prompt="Once upon", echo=True, max_tokens=3, n=2)
    assert [choice.logprobs for choice in plain.choices] == [None, None]
    assert all(choice.text.startswith("Once upon") for choice in plain.choices)


async def test_engines_that_cannot_change_logits_refuse_at_the_door(tmp_path: Path) -> None:
    """Not where a worker of the model has an engine that can."""
    with served(tmp_path) as service:
        worker, able = ThreadedWorker.of(service), ThreadedWorker.of(service)
        worker.engine, able.engine, able.name = "vllm", "native", "able"
        url = f"{service.url}/v1"
        with worker:
            async with AsyncOpenAI(base_url=url, api_key=service.key, max_retries=0) as client:
                await until_served(client)
                for asked in ({"top_p": 0.5}, {"logprobs": True, "top_logprobs": 2}):
                    with pytest.raises(
                        openai.BadRequestError, match=f"{list(asked)[-1]}: .*engine vllm.* does not support"
                    ):
                        await client.chat.completions.create(model=MODEL, messages=HELLO, **asked)  # type: ignore[call-overload]
                assert (await client.chat.completions.create(model=MODEL, messages=HELLO)).choices
                headers = {"X-API-Key": service.key}
                with able, httpx.Client(base_url=service.url, headers=headers, timeout=60) as admin:
                    until(lambda: admin.get("/api/v1/workers").text.count('"serving"') == 2)
                    assert (await client.chat.completions.create(model=MODEL, messages=HELLO, top_p=0.5)).choices


def test_chunks_of_a_stream_have_every_token_once(face: Open) -> None:
    asked: dict[str, Any] = {"n": 2, "extra_body": {"return_token_ids": True}, "logprobs": True, "max_tokens": 60}
    whole = face.chat(**asked)
    pieces = [choice for chunk in face.chat(stream=True, **asked) for choice in chunk.choices]
    for expected in whole.choices:
        mine = [piece.to_dict() for piece in pieces if piece.index == expected.index]
        assert mine[0]["prompt_token_ids"] == expected.prompt_token_ids
        for field in ("token_ids", "token_logprobs", "token_versions"):
            assert [entry for piece in mine for entry in piece.get(field, [])] == getattr(expected, field)
        logged = [entry for piece in mine for entry in (piece.get("logprobs") or {}).get("content", [])]
        assert logged == expected.to_dict()["logprobs"]["content"]


def test_tokens_of_a_stop_string_are_returned_without_their_text(face: Open) -> None:
    plain = face.text(extra_body={"return_token_ids": True}, logprobs=0).choices[0]
    text = plain.text
    at = next(n for n in range(6, 20) if text[n : n + 2] not in text[: n + 1])
    cut = face.text(extra_body={"return_token_ids": True}, logprobs=0, stop=text[at : at + 2]).choices[0]
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    logged = cut.logprobs
    assert len(cut.token_ids) > len(logged.tokens) == len(logged.token_logprobs) == len(logged.text_offset)
    assert logged.token_logprobs == cut.token_logprobs[: len(logged.tokens)]
    assert logged.text_offset == sorted(logged.text_offset) and logged.text_offset[-1] < at == len(cut.text)
    assert logged.top_logprobs is None


# --- models -----------------------------------------------------------------------------------------------------------


def test_models_lists_the_targets_that_can_be_sampled(face: Open) -> None:
    names = [model.id for model in face.client.models.list()]
    assert names == [face.base, f"{face.job}:latest", f"{face.job}@1", f"{face.job}@0"]
    assert [model.id for model in face.stranger.models.list()] == [face.base]
    for name in (*names, face.job, f"{face.job}/main", f"{face.job}/main@1"):
        found = face.client.models.retrieve(name)
        assert found.id == name and found.object == "model"
        assert (found.owned_by, found.created > 0) == (("rookery", False) if name == face.base else ("admin", True))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_wrong_key_is_refused(face: Open) -> None:
    with OpenAI(base_url=f"{face.service.url}/v1", api_key="tml-wrong", max_retries=0) as client:
        for ask in (client.models.list, lambda: client.chat.completions.create(model=face.base, messages=HELLO)):
            with pytest.raises(openai.AuthenticationError) as refused:
                ask()
            assert refused.value.code == "invalid_api_key" and "tml-" in refused.value.message
            assert refused.value.request_id and refused.value.request_id.startswith("req-")


def test_every_response_has_an_id(face: Open) -> None:
    asked: list[tuple[str, str, Any]] = [
        ("GET", "/v1/models", None),
        ("GET", f"/v1/models/{face.base}", None),
        ("GET", "/v1/files", None),
        ("GET", "/v1/fine_tuning/jobs/ftjob-none", None),
        ("POST", "/v1/chat/completions", {"model": face.base, "messages": HELLO, "max_tokens": 1, "stream": True}),
        ("POST", "/v1/chat/completions", {}),
        ("POST", "/v1/nothing", {}),
    ]
    named = [face.http.request(method, path, json=body).headers["x-request-id"] for method, path, body in asked]
    assert len({*named}) == len(asked)


def test_unknown_hub_model_is_404_which_clients_do_not_retry(face: Open) -> None:
    with pytest.raises(openai.NotFoundError, match="no base model 'someone/some-model'") as refused:
        face.client.chat.completions.create(model="someone/some-model", messages=HELLO)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("suffix", ["@99", "@-1", "@first"])
def test_missing_version_is_refused(face: Open, suffix: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        face.chat(model=face.job + suffix)
    assert refused.value.status_code in (400, 404)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {"five": 100}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 20, "n": 128, "max_tokens": 400}, "logprobs"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"no_such_thing": 1}}, "no_such_thing"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": ["enable_thinking"]}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "grammar": "x"}}},
            "response_format.json_schema.grammar",
        ),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "nan"}, "temperature"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "name": ["Ada"]}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": "x", "name": {"first": "Ada"}}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": "x", "participant": "Ada"}]}, "messages.0.participant"),
        (
            {"messages": [{"role": "assistant", "content": "x", "provider": {"refusal": "no"}}, *HELLO]},
            "messages.0.provider",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"model": ""}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_argument_is_refused_by_name(face: Open, asked: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        face.chat(**asked, stream=stream)
    assert refused.value.param == param and param in refused.value.message
    assert refused.value.type == "invalid_request_error" and "\n" not in refused.value.message


def test_image_and_too_long_prompt_are_refused(face: Open) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content"):
        face.chat(messages=[{"role": "user", "content": [image]}])
    with pytest.raises(
        openai.BadRequestError, match="maximum context length is 512 tokens; the prompt has 600"
    ) as refused:
        face.text(prompt="x" * 600)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [5, 100_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [[5], [6, 1 << 32]]}, "prompt.1.1"),
        ({"prompt": ["x", 5]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ],
    ids=str,
)
def test_prompt_that_cannot_be_continued_is_refused(face: Open, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        face.text(**asked)
    assert refused.value.param == param, refused.value.message


def test_arguments_with_default_values_are_accepted(face: Open) -> None:
    answer = face.chat(
        top_p=1, frequency_penalty=0, presence_penalty=0, logit_bias={}, tools=[], tool_choice="none", user="ada",
        response_format={"type": "text"}, store=False, metadata={"a": "b"}, service_tier="auto", top_logprobs=0,
        stream_options={"include_obfuscation": False}, reasoning_effort="none",
        extra_body={"top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "stop_token_ids": [], "bad_words": [],
                    "guided_regex": "", "best_of": 1, "echo": False, "priority": 0, "chat_template_kwargs": {}},
    )  # fmt: skip
    assert answer.choices[0].message.content == face.chat().choices[0].message.content


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_names_of_participants_are_passed_to_the_template(face: Open, role: str) -> None:
    """AutoGen sends them with every message. The template of this model writes none."""
    given = ConversationMessage.model_validate({"role": role, "content": "x", "name": "Ada"})
    written = {"role": "user" if role == "user" else "system", "content": "x"}
    assert given.for_template("messages.0") == {**written, "name": "Ada"} and not given.unread
    for empty in ("", None, {"first": None}):
        plain = ConversationMessage.model_validate({"role": role, "content": "x", "name": empty})
        assert plain.for_template("messages.0") == written
    litellm = {"role": "assistant", "content": "x", "provider_specific_fields": {"refusal": None}}
    assert not ConversationMessage.model_validate(litellm).unread
    messages: list[Any] = [{"role": role, "content": "Be brief."}, *HELLO]
    named = [{**message, "name": "Ada"} for message in messages]
    texts = [face.chat(messages=asked).choices[0].message.content for asked in (named, messages)]
    assert texts[0] == texts[1]


def test_malformed_requests_and_unknown_paths_have_openais_format(face: Open) -> None:
    response = face.http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    half = b'{"model": "x", "messages": [{"role": "user", "content": "\\ud800"}]}'
    response = face.http.post("/v1/chat/completions", content=half, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "half of one" in response.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="there are /v1/chat/completions"):
        face.client.get("/no/such/thing", cast_to=object)
    for call, reason in (
        (lambda: face.client.moderations.create(input="x"), "nothing is classified here"),
        (lambda: face.client.batches.retrieve("x"), "requests are not collected"),
        (lambda: face.client.responses.retrieve("resp_1"), "responses are not stored"),
        (lambda: face.client.chat.completions.retrieve("chatcmpl-1"), "chats are not stored"),
    ):
        with pytest.raises(openai.NotFoundError, match=reason) as refused:
            call()
        assert refused.value.type == "invalid_request_error"


# --- hanging up, stopping ---------------------------------------------------------------------------------------------


class Endless(ThreadedWorker):
    """Says the first token of every answer, and then nothing more."""

    def __init__(self, root: Path, service: EmbeddedService) -> None:
        token = (root / "data" / "worker.token").read_text().strip()
        super().__init__(service.url, token, tokenizer(root))
        self.generates: list[protocol.Generate] = []

    def _chunk(self, message: protocol.Generate) -> protocol.TokenChunk:
        self.generates.append(message)
        chunk = super()._chunk(message)
        chunk.tokens, chunk.logprobs, chunk.finish = chunk.tokens[:1], chunk.logprobs[:1], ""
        return chunk


async def until_running(client: AsyncOpenAI, count: int) -> None:
    """Waits for the service to say that so many requests run."""
    async with asyncio.timeout(30):
        while True:
            health: Any = await client.get("/../api/v1/health", cast_to=object)
            if health["gauges"]["requests_running"] == count:
                return


async def test_disconnecting_client_ends_its_generation(tmp_path: Path) -> None:
    with served(tmp_path) as service, Endless(tmp_path, service) as worker:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client:
            await until_served(client)
            asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 3, "seed": 0}
            stream = await client.chat.completions.create(**asked, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            await until_running(client, 3)
            await stream.close()
            await until_running(client, 0)
            whole = asyncio.create_task(client.chat.completions.create(**asked))
            await until_running(client, 3)
            whole.cancel()
            await until_running(client, 0)
            await eventually(lambda: len(worker.generates) == 6)


@pytest.mark.parametrize("limit", [{"tenant_requests": 4}, {"tenant_request_tokens": 925}])
async def test_a_request_beyond_a_limit_has_its_status_also_streamed(tmp_path: Path, limit: dict[str, int]) -> None:
    """All its choices are admitted or none; alone, a request has no limit."""
    with served(tmp_path, **limit) as service, Endless(tmp_path, service) as worker:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client:
            await until_served(client)
            chat: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 200}
            alone = await client.chat.completions.create(**chat, n=8, stream=True)
            await until_running(client, 8)
            await alone.close()
            await until_running(client, 0)
            three = await client.chat.completions.create(**chat, n=3, stream=True)
            await until_running(client, 3)
            text: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
            for stream in (False, True):
                for asked in (
                    client.chat.completions.create(**chat, n=2, stream=stream),
                    client.completions.create(**text, prompt=["a", "b"], stream=stream),
                ):
                    with pytest.raises(openai.RateLimitError, match="of yours wait or run, allowed") as refused:
                        await asked
                    assert int(refused.value.response.headers["Retry-After"]) > 0
            assert len(worker.generates) == 8 + 3
            another = asyncio.create_task(client.chat.completions.create(**chat, n=1))
            await until_running(client, 3 + 1)
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(model=MODEL, input="Hello?", stream=True)
            another.cancel()
            await three.close()
            await until_running(client, 0)


async def test_base_model_is_waited_for_while_a_worker_may_return(tmp_path: Path) -> None:
    with served(tmp_path) as service:
        async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0) as client:
            asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 0}
            with pytest.raises(openai.InternalServerError, match=f"no worker serves {MODEL} now") as refused:
                await client.chat.completions.create(**asked)
            assert refused.value.status_code == 503 and "x-should-retry" not in refused.value.response.headers
            with ThreadedWorker.of(service):
                await until_served(client)
            while (await client.models.list()).data:  # it has left without a word, and may come back
                pass
            waiting = asyncio.create_task(client.chat.completions.create(**asked))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.5)
            with ThreadedWorker.of(service):
                assert (await waiting).choices[0].message.content in ("4", "five")


async def until_served(client: AsyncOpenAI) -> None:
    async with asyncio.timeout(30):
        while not (await client.models.list()).data:
            pass


@pytest.mark.parametrize("slo_gate", [True, False])
async def test_objectives_follow_the_settings_and_requests_end_with_the_service(tmp_path: Path, slo_gate: bool) -> None:
    changes = {"slo_gate": slo_gate, "ttft_ms": 700.0, "slo_overrides": "chat=900/80, completion=400/50"}
    with served(tmp_path, **changes) as service, Endless(tmp_path, service) as worker:
        client = AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.key, max_retries=0)
        await until_served(client)
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        whole = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
        await eventually(lambda: len(worker.generates) == 2)  # a request runs from when it was sent
        assert all(generate.client and generate.reserved for generate in worker.generates)
        assert {generate.tpot_ms for generate in worker.generates} == {80.0 if slo_gate else 0.0}
        due = [generate.ttft_ms for generate in worker.generates]  # less the time that they waited for a worker
        assert all(0 < ttft <= 900 for ttft in due) if slo_gate else due == [0.0, 0.0]
        stopping = asyncio.create_task(asyncio.to_thread(service.__exit__, None, None, None))
        with pytest.raises(openai.APIError, match="the service is stopping"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="the service is stopping"):
            await whole
        await client.close()
        await stopping


# --- tokens in, tokens out -----------------------------------------------------------------------------------------


def tokens(face: Open, **asked: Any) -> httpx.Response:
    sampling = {"max_tokens": 12, "seed": 7, "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": []}
    body = {"model": face.base, "token_ids": [79, 110], "sampling_params": {**sampling, **asked.pop("sampling", {})}}
    return face.http.post("/inference/v1/generate", json={**body, **asked})


def test_the_token_face_samples_the_text_of_completions(face: Open) -> None:
    found = tokens(face, return_token_ids=True).json()
    text = face.text(prompt=[79, 110], max_tokens=12, extra_body={"return_token_ids": True}).choices[0]
    [choice] = found["choices"]
    assert choice["token_ids"] == text.token_ids and found["prompt_token_ids"] == [79, 110]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["logprob"] for entry in content] == text.token_logprobs
    assert choice["finish_reason"] in ("stop", "length") and choice["token_versions"] == [0] * len(content)
    assert found["usage"]["completion_tokens"] == len(content) and found["request_id"]
    assert tokens(face, stream=False, sampling={"stream": False}).status_code == 200
    version = tokens(face, model=f"{face.job}@1").json()
    assert version["model"] == f"{face.job}@1" and set(version["choices"][0]["token_versions"]) == {1}


def test_a_token_that_the_caller_names_ends_the_answer(face: Open) -> None:
    whole = tokens(face).json()["choices"][0]["token_ids"]
    stop = whole[4]
    [choice] = tokens(face, sampling={"stop_token_ids": [stop]}).json()["choices"]
    assert choice["token_ids"] == whole[: whole.index(stop) + 1] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "status", "says"),
    [
        ({"token_ids": []}, 400, "token_ids"),
        ({"token_ids": [1 << 20]}, 400, "the token id 1048576, which"),
        ({"token_ids": [1] * 10_000}, 400, "maximum context length"),
        ({"features": {"mm_hashes": {}}}, 400, "features is not supported"),
        ({"sampling": {"stop_token_ids": [-1]}}, 400, "stop_token_ids"),
        ({"sampling": {"logprobs": 5}}, 400, "sampling_params.logprobs"),
        ({"sampling": {"stream": True}}, 400, "sampling_params.stream"),
        ({"stream": True}, 400, "stream"),
        ({"sampling": {"guided": "x"}}, 400, "guided is not supported"),
        ({"sampling": {"temperature": -1}}, 400, "sampling_params.temperature"),
        ({"model": "nothing"}, 404, "nothing"),
    ],
)
def test_mistakes_of_the_token_face_have_openais_format(
    asked: dict[str, Any], status: int, says: str, face: Open
) -> None:
    response = tokens(face, **asked)
    assert response.status_code == status and says in response.json()["error"]["message"]


def test_models_have_the_length_of_their_context(face: Open) -> None:
    listed = face.http.get("/v1/models").json()["data"]
    lengths = {model["id"]: model.get("max_model_len") for model in listed}
    assert lengths[face.base] and set(lengths.values()) == {lengths[face.base]}
