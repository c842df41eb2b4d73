"""Changed logits: the rules against transformers', and what the native engine draws from them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny import native_engine, smollm2, smollm2_folder
from tests.worker.engine.test_engine import finish, make, order

from rookery import protocol
from rookery.errors import UserError
from rookery.tokenization.chat import Chat
from rookery.tokenization.grammar import ANY_OBJECT, Grammar, ReplyGrammar
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import best_runner
from rookery.worker.engine.request import RequestLogits
from rookery.worker.model.lora import LoraManager

VOCABULARY = 40

LINES = st.lists(st.integers(-800, 800), min_size=VOCABULARY, max_size=VOCABULARY, unique=True).map(
    lambda values: torch.tensor(values) / 100
)
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


def changed(line: torch.Tensor, tokens: list[int], temperature: float = 1.0, **params: Any) -> torch.Tensor:
    return RequestLogits(protocol.LogitsParams(**params), [1, 2]).apply(line, tokens, temperature)


@settings(deadline=None, max_examples=50)
@given(line=LINES, top_p=st.floats(0.05, 0.99), top_k=st.integers(1, 60), min_p=st.floats(0.01, 1.0))
def test_truncation_keeps_the_tokens_that_transformers_keeps(
    line: torch.Tensor, top_p: float, top_k: int, min_p: float
) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    p = line.softmax(-1).sort(descending=True).values.cumsum(-1)
    if (p - top_p).abs().min() > 1e-5:  # at the very limit the last bit of a sum decides
        assert changed(line, [], top_p=top_p).equal(transformers.TopPLogitsWarper(top_p)(ids, line[None])[0])
    assert changed(line, [], top_k=top_k).equal(transformers.TopKLogitsWarper(top_k)(ids, line[None])[0])
    q = line.softmax(-1)
    if (q - min_p * q.max()).abs().min() > 1e-6:
        assert changed(line, [], min_p=min_p).equal(transformers.MinPLogitsWarper(min_p)(ids, line[None])[0])


@settings(deadline=None, max_examples=50)
@given(line=LINES, tokens=TOKENS, penalty=st.floats(0.5, 2.0), frequency=st.floats(-2, 2), presence=st.floats(-2, 2))
def test_penalties_are_those_of_transformers_and_openai(
    line: torch.Tensor, tokens: list[int], penalty: float, frequency: float, presence: float
) -> None:
    ids = torch.tensor([[1, 2, *tokens]])
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, line[None])[0]
    torch.testing.assert_close(changed(line, tokens, repetition_penalty=penalty), expected)
    counts = np.bincount(tokens, minlength=VOCABULARY) if tokens else np.zeros(VOCABULARY)
    subtracted = torch.from_numpy(counts * frequency + (counts > 0) * presence).float()
    found = changed(line, tokens, frequency_penalty=frequency, presence_penalty=presence)
    torch.testing.assert_close(found, line - subtracted)


def test_greedy_text_is_not_truncated_but_biased() -> None:
    line = torch.linspace(-1, 1, VOCABULARY)
    assert changed(line, [], temperature=0.0, top_p=0.1, top_k=1, min_p=0.9).equal(line)
    assert changed(line, [], temperature=0.0, logit_bias=[(3, 50.0)]).argmax() == 3


@settings(deadline=None, max_examples=30)
@given(line=LINES, biases=st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.integers(-100, 100)), max_size=60))
def test_biases_of_a_token_add_up(line: torch.Tensor, biases: list[tuple[int, int]]) -> None:
    expected = line.clone()
    for token, bias in biases:
        expected[token] += bias
    torch.testing.assert_close(changed(line, [], logit_bias=[(token, float(bias)) for token, bias in biases]), expected)


CHANGES: list[dict[str, Any]] = [
    {"top_p": 0.5},
    {"top_k": 3},
    {"min_p": 0.3},
    {"frequency_penalty": -2.0, "presence_penalty": -1.0, "repetition_penalty": 0.8},
    {"logit_bias": [(7, 30.0), (8, 30.0)]},
    {"top_logprobs": 4},
]


@pytest.mark.parametrize("params", CHANGES, ids=str)
def test_changed_requests_resume_and_do_not_affect_other_requests(params: dict[str, Any]) -> None:
    plain = [order(name=f"plain {seed}", seed=seed, prompt=[seed, 2, 3, 4]) for seed in range(3)]
    whole = order(name="changed", logits=protocol.LogitsParams(**params))
    engine = make()
    for one in plain:
        engine.submit(one)
    alone = finish(engine)
    engine = make()
    for one in (plain[0], whole, *plain[1:]):
        engine.submit(one)
    beside = finish(engine)
    assert {name: beside[name][0] for name in alone} == {name: tokens for name, (tokens, _) in alone.items()}
    tokens = beside["changed"][0]
    engine = make()
    engine.submit(order(name="changed", logits=protocol.LogitsParams(**params), prefix_tokens=tokens[:5]))
    assert finish(engine)["changed"][0] == tokens[5:]
    engine = make()
    engine.submit(order(name="changed"))
    assert (finish(engine)["changed"][0] != tokens) == (params.keys() != {"top_logprobs"})


def test_likeliest_tokens_come_with_each_token_and_agree_with_its_log_probability() -> None:
    engine = make()
    engine.submit(order(name="r", logits=protocol.LogitsParams(top_logprobs=300), prefix_tokens=[5, 6]))
    seen = 0
    while engine.step() or engine.active:
        for chunk in engine.drain():
            assert len(chunk.top_logprobs) == len(chunk.tokens)
            for token, logprob, top in zip(chunk.tokens, chunk.logprobs, chunk.top_logprobs, strict=True):
                assert abs(dict(top)[token] - logprob) < 1e-4
                assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
                assert abs(sum(np.exp(value) for _, value in top) - 1) < 1e-4
                seen += 1
    assert seen == 10


# --- schemas ----------------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.load(smollm2_folder())


def real(chat: Chat, **options: Any) -> NativeEngine:
    decoder = smollm2()
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    runner = best_runner(decoder, loras, 1 << 28)
    return native_engine(decoder, loras, chat.decode, max_rows=8, kv_budget_bytes=1 << 28, runner=runner, **options)


def submit(engine: NativeEngine, generate: protocol.Generate, grammar: Grammar) -> None:
    engine.submit(generate, ReplyGrammar(grammar, generate.prefix_tokens))


def test_text_follows_its_schema_in_a_batch_and_resumed(chat: Chat) -> None:
    prompt = chat.prompt([{"role": "user", "content": "Describe a person as JSON."}])
    common = {"prompt": prompt, "shared_prefix": 0, "max_tokens": 60, "stop_tokens": chat.stop_tokens}
    schema = protocol.LogitsParams(schema=json.dumps(PERSON))
    engine, grammar = real(chat), Grammar(chat.grammars(smollm2().vocab), schema.schema)
    engine.submit(order(name="free", **{**common, "max_tokens": 12}))
    free = finish(engine)["free"][0]
    for seed in range(2):
        submit(engine, order(name=f"json {seed}", **common, seed=seed, logits=schema, temperature=1.5), grammar)
    engine.submit(order(name="free", **{**common, "max_tokens": 12}))
    texts = finish(engine)
    assert texts["free"][0] == free
    for seed in range(2):
        tokens, last = texts[f"json {seed}"]
        assert last.finish == "stop"
        jsonschema_rs.validate(PERSON, json.loads(chat.decode(tokens)))
    tokens = texts["json 1"][0]
    moved = {"prefix_tokens": tokens[: len(tokens) // 2], "seed": 1, "logits": schema, "temperature": 1.5}
    submit(engine, order(name="moved", **common, **moved), grammar)
    assert finish(engine)["moved"][0] == tokens[len(tokens) // 2 :]


def test_rows_whose_grammars_take_long_take_turns_and_write_the_same(chat: Chat) -> None:
    grammar = Grammar(chat.grammars(smollm2().vocab), json.dumps(PERSON))
    schema = protocol.LogitsParams(schema=json.dumps(PERSON))
    common: dict[str, Any] = {"prompt": chat.encode("Say"), "shared_prefix": 0, "max_tokens": 6, "stop_tokens": []}

    def texts(**options: float) -> tuple[dict[str, list[int]], float]:
        engine = real(chat, **options)
        for seed in range(3):
            submit(engine, order(name=str(seed), **common, seed=seed, logits=schema, temperature=1.5), grammar)
        engine.submit(order(name="free", **common))
        return {name: tokens for name, (tokens, _) in finish(engine).items()}, engine.stats["decode_steps"]

    (together, least), (in_turns, steps) = texts(), texts(mask_seconds=0.0)
    assert in_turns == together and least == 5 and steps == 3 * 5  # one grammar in each step


def test_text_that_cannot_follow_its_schema_fails_alone(chat: Chat) -> None:
    engine = real(chat)
    common: dict[str, Any] = {"prompt": chat.encode("Say"), "shared_prefix": 0, "max_tokens": 4}
    schema = protocol.LogitsParams(schema=ANY_OBJECT)
    grammar = Grammar(chat.grammars(smollm2().vocab), ANY_OBJECT)
    submit(engine, order(name="bad", **common, logits=schema, prefix_tokens=chat.encode("no JSON")), grammar)
    engine.submit(order(name="good", **common))
    ends = finish(engine)
    assert ends["bad"][1].finish == "error" and "cannot follow its schema" in ends["bad"][1].error
    assert len(ends["good"][0]) == 4
    for wrong in ('{"type": "banana"}', "no JSON", '{"not": {}}', '{"$ref": "http://example.com/x"}', "[]", "1"):
        with pytest.raises(UserError, match="schema"):
            Grammar(chat.grammars(), wrong)
    with pytest.raises(ValueError, match="no grammar"):
        make().submit(order(logits=schema))
