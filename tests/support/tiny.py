"""Random small models of every family, and the real SmolLM2, for tests; and how to divide their products as where tile
instructions multiply."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rookery.worker.engine.native.engine import NativeEngine, SliceLimits
from rookery.worker.engine.native.runner import WeightSets, best_runner
from rookery.worker.engine.runner import Runner
from rookery.worker.model import batch_invariance, layers
from rookery.worker.model.adapter import PARTS, Adapter, ResidentModel, init_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.convert import prepare
from rookery.worker.model.decoder import Decoder, best_dtype
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.published import fuse

COMPUTED = best_dtype()
"""The type in which a worker computes on this machine: promises of equal bits hold for it."""

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama biased": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3.1 rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama linear rope": transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama one head": transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "mistral window": transformers.MistralConfig(**SIZES, sliding_window=7, head_dim=32),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2 window": transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen2 yarn": transformers.Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "smollm3": transformers.SmolLM3Config(**SIZES, **SPECIAL, no_rope_layer_interval=2),
}


def reference(family: str) -> transformers.PreTrainedModel:
    """transformers' model with random weights, float32."""
    torch.manual_seed(3)
    config = FAMILIES[family]
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # norms start at 1 and biases at 0: move them, or a missing one would not show
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
        else:  # far enough from zero for the logits to differ by some nats
            torch.nn.init.normal_(weight, 0.0, 0.15)
    return model


def trained_adapter(
    decoder: Decoder, rank: int, seed: int, strength: float = 0.3, targets: Sequence[str] = ()
) -> Adapter:
    """A LoRA with a random B, so that it changes the text; of all projections or of three by default."""
    targets = targets or (PARTS if seed % 2 else ("q", "v", "down"))
    initial = init_adapter(decoder.config, rank, 2.0 * rank, targets, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        site: (a, torch.randn(b.shape, generator=generator) * strength / rank**0.5)
        for site, (a, b) in initial.weights.items()
    }
    return Adapter(rank, initial.alpha, weights)


@cache
def small(family: str, dtype: torch.dtype = COMPUTED) -> Decoder:
    """The model of :func:`reference` in the decoder."""
    model = reference(family)
    config = DecoderConfig.from_hf(model.config.to_dict())
    weights = {name: weight.detach().to(dtype) for name, weight in model.state_dict().items()}
    return Decoder(config, fuse(config, weights), pack=True)


@cache
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, prepared once per machine."""
    return prepare("smollm2-135m-instruct", Path(os.environ.get("ROOKERY_CACHE", "~/.cache/rookery")).expanduser())


@cache
def smollm2(dtype: torch.dtype = COMPUTED) -> Decoder:
    return Decoder.load(smollm2_folder(), dtype, pack=True)


def divide(monkeypatch: pytest.MonkeyPatch, depth: int, rows: int) -> None:
    """Products of decoders and banks that are made from now on are divided as where tile instructions multiply, of
    whichever type: in pieces of ``depth``, in blocks of ``rows``."""
    for module in (batch_invariance, layers):
        monkeypatch.setattr(module, "uses_amx", lambda dtype, device: True)
        monkeypatch.setattr(module, "TILE_DEPTH", depth)
    monkeypatch.setattr(layers, "TILE_ROWS", rows)


def native_engine(
    decoder: ResidentModel,
    loras: LoraManager,
    decode: Callable[[list[int]], str] = lambda tokens: "",
    *,
    max_rows: int = 8,
    kv_budget_bytes: int = 1 << 26,
    runner: Runner | None = None,
    **options: Any,
) -> NativeEngine:
    """An engine of the ``runner``, or of the decoder's device. ``options``: those of the engine and of its slices."""
    made = runner or best_runner(decoder, loras, kv_budget_bytes)
    slices = SliceLimits(**{name: options.pop(name) for name in SLICES & options.keys()})
    return NativeEngine(WeightSets(decoder, loras, made), decode, max_rows=max_rows, slices=slices, **options)


SLICES = {field.name for field in fields(SliceLimits)}
