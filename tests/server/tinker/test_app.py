"""The Tinker API end to end: the real SDK, the real service, a real worker on the small random model."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tests.support.tinkered import MODEL, PATIENCE, datum, logprobs, trainer
from tinker import types

TOKENS = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]


def test_quick_start(visitor: tinker.ServiceClient) -> None:
    training = trainer(visitor)
    info = training.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, MODEL)
    tokenizer = training.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    data = [datum(TOKENS, [1.0] * 11)]
    first = training.forward_backward(data, "cross_entropy").result(PATIENCE)
    [before] = logprobs(first)
    assert before.shape == (11,)
    assert first.metrics["loss:sum"] == pytest.approx(-before.sum(), rel=1e-4)
    stepped = training.optim_step(types.AdamParams(learning_rate=0.05)).result(PATIENCE)
    assert stepped.metrics is not None and stepped.metrics["durable"] == 1.0
    [after] = logprobs(training.forward(data, "cross_entropy").result(PATIENCE))
    assert after.sum() > before.sum() + 1
    sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
    prompt = types.ModelInput.from_ints(TOKENS[:4])
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=7)
    answer = sampler.sample(prompt, 3, params).result(PATIENCE)
    assert len(answer.sequences) == 3
    for sequence in answer.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs or []) <= 8
    again = sampler.sample(prompt, 3, params).result(PATIENCE)
    assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
    assert len({tuple(s.tokens) for s in answer.sequences}) > 1


def test_training_and_sampling_agree_on_logprobs(visitor: tinker.ServiceClient) -> None:
    training = trainer(visitor)
    sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
    answer = sampler.sample(
        types.ModelInput.from_ints(TOKENS), 4, types.SamplingParams(max_tokens=16, seed=3, stop=[])
    ).result(PATIENCE)
    for sequence in answer.sequences:
        whole = [*TOKENS, *sequence.tokens]
        [scored] = logprobs(training.forward([datum(whole)], "cross_entropy").result(PATIENCE))
        gap = np.abs(scored[len(TOKENS) - 1 :] - np.array(sequence.logprobs))
        assert gap.max() < 0.1  # bfloat16: sums of 64 products, twice


def test_prompt_logprobs_are_those_of_training(visitor: tinker.ServiceClient) -> None:
    training = trainer(visitor)
    training.forward_backward([datum(TOKENS, [1.0] * 11)], "cross_entropy").result(PATIENCE)
    training.optim_step(types.AdamParams(learning_rate=0.05)).result(PATIENCE)
    sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
    long = TOKENS * 30  # more than one slice of the engine's
    for tokens in (TOKENS, long):
        [scored] = logprobs(training.forward([datum(tokens)], "cross_entropy").result(PATIENCE))
        prompt = types.ModelInput.from_ints(tokens)
        found = sampler.compute_logprobs(prompt).result(PATIENCE)
        assert found[0] is None and len(found) == len(tokens)
        assert np.abs(np.array(found[1:], float) - scored).max() < 0.1
        last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result(PATIENCE)
        assert last[:-3] == [None] * (len(tokens) - 3)
        np.testing.assert_allclose(np.array(last[-3:], float), np.array(found[-3:], float), atol=0.05)
    answer = sampler.sample(
        types.ModelInput.from_ints(TOKENS), 2, types.SamplingParams(max_tokens=3), True, topk_prompt_logprobs=4
    ).result(PATIENCE)
    assert len(answer.sequences) == 2
    assert answer.prompt_logprobs is not None and answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    for token, logprob, row in zip(
        TOKENS[1:], answer.prompt_logprobs[1:], answer.topk_prompt_logprobs[1:], strict=True
    ):
        assert row is not None and logprob is not None and len(row) == 4
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)
        assert dict(row).get(token, logprob) == pytest.approx(logprob)
        assert logprob <= row[0][1] + 1e-6
