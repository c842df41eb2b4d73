"""The engine still samples the texts that it sampled before.

``tests/data/golden_texts.json`` was recorded when the kernels' attention came to sum by positions, wherever a shared
prefix ends, so that training computes the same bits: requests (adapter, prompt, shared prefix, temperature, seed) with
their tokens and their log-probabilities, rounded to six digits. bfloat16 texts are those of the kernels; they depend on
the processor's instructions, so they are compared only where torch finds the same ones. In float32 the tokens are
compared everywhere, with kernels and without, and the log-probabilities within ``FLOAT32_TOLERANCE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import native_engine, small, smollm2, trained_adapter

from rookery import protocol
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import DenseRunner, KernelRunner
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden_texts.json").read_text())
FLOAT32_TOLERANCE = 1e-4
PROCESSOR = {
    "capability": torch.backends.cpu.get_cpu_capability(),
    "bfloat16": torch.cpu._is_avx512_bf16_supported(),
    "tiles": torch.cpu._is_amx_tile_supported(),
}
SAME_PROCESSOR = GOLDEN["processor"] == PROCESSOR

Text = tuple[list[int], list[float]]


def golden(model: str, dtype: str) -> list[dict[str, Any]]:
    return [text for text in GOLDEN["texts"] if (text["model"], text["dtype"]) == (model, dtype)]


def new_engine(decoder: Decoder, strength: float, runner: type[DenseRunner | KernelRunner]) -> NativeEngine:
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    for key, about in GOLDEN["adapters"].items():
        loras.add(key, trained_adapter(decoder, about["rank"], about["seed"], strength))
    made = runner(decoder, loras, 1 << 28)
    return native_engine(decoder, loras, lambda tokens: "", max_rows=32, kv_budget_bytes=1 << 28, runner=made)


def run(engine: NativeEngine, requests: list[dict[str, Any]]) -> dict[str, Text]:
    """Sampled tokens and log-probabilities by request."""
    texts: dict[str, Text] = {request["name"]: ([], []) for request in requests}
    for request in requests:
        key = request["adapter"]
        engine.submit(
            protocol.Generate(
                request=request["name"],
                adapter=protocol.AdapterRef(policy=key, version=3, hash=key, rank=16, alpha=1.0) if key else None,
                prompt=request["prompt"],
                shared_prefix=request["shared_prefix"],
                prefix_tokens=request.get("prefix_tokens", []),
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                seed=request["seed"],
                stop_tokens=[],
            )
        )
    while engine.step():
        for chunk in engine.drain():
            texts[chunk.request][0].extend(chunk.tokens)
            texts[chunk.request][1].extend(chunk.logprobs)
    return texts


def assert_same(text: Text, tokens: list[int], logprobs: list[float], *, exact: bool) -> None:
    assert text[0] == tokens
    if exact:
        assert [round(logprob, 6) for logprob in text[1]] == logprobs
    else:
        assert text[1] == pytest.approx(logprobs, abs=FLOAT32_TOLERANCE)


def check(
    decoder: Decoder,
    texts: list[dict[str, Any]],
    alone: int,
    runner: type[DenseRunner | KernelRunner],
    *,
    exact: bool,
) -> None:
    """All texts in one batch; the first ``alone`` of them also each by itself and resumed from the middle."""
    strength = texts[0]["strength"]
    batched = run(new_engine(decoder, strength, runner), [text["request"] for text in texts])
    for text in texts:
        assert_same(batched[text["request"]["name"]], text["tokens"], text["logprobs"], exact=exact)
    for text in texts[:alone]:
        request, tokens, logprobs = text["request"], text["tokens"], text["logprobs"]
        name, cut = request["name"], len(tokens) // 2
        assert_same(run(new_engine(decoder, strength, runner), [request])[name], tokens, logprobs, exact=exact)
        resumed = run(new_engine(decoder, strength, runner), [{**request, "prefix_tokens": tokens[:cut]}])[name]
        assert_same(resumed, tokens[cut:], logprobs[cut:], exact=exact)


@pytest.mark.parametrize("runner", [DenseRunner, KernelRunner])
def test_random_model_in_float32(runner: type[DenseRunner | KernelRunner]) -> None:
    if runner is KernelRunner and not kernels.load(None):
        pytest.skip(kernels.runtime.why_unavailable())
    check(small("llama", torch.float32), golden("random llama", "float32"), 3, runner, exact=False)


@pytest.mark.skipif(not SAME_PROCESSOR, reason=f"recorded on {GOLDEN['processor']}, this is {PROCESSOR}")
@pytest.mark.parametrize(("model", "alone"), [("random llama", 6), ("smollm2", 0)])  # alone: test_exactness.py
def test_bfloat16(model: str, alone: int) -> None:
    assert kernels.load(None)
    decoder = smollm2(torch.bfloat16) if model == "smollm2" else small("llama", torch.bfloat16)
    check(decoder, golden(model, "bfloat16"), alone, KernelRunner, exact=True)
