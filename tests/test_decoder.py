"""The decoder against transformers in float32, on random small models of every family."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor

from rookery.errors import UserError
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.weights import fuse

SMALL = dict(
    vocab_size=211,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama biased": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama 3.1 rope": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "linear rope": transformers.LlamaConfig(
        **SMALL, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
    ),
    "mistral window": transformers.MistralConfig(**SMALL, sliding_window=7, head_dim=32),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2 window": transformers.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen2 yarn": transformers.Qwen2Config(**SMALL, rope_parameters=YARN),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    "smollm3": transformers.SmolLM3Config(
        **SMALL, no_rope_layer_interval=2, pad_token_id=0, bos_token_id=1, eos_token_id=2
    ),
}


def reference(config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:  # norms start at 1 and biases at 0: move them, or a missing one would not show
            torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model


class Causal:
    """Plain causal attention of one sequence, for checking the decoder alone."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, window = len(q), self.config.windows[layer]
        k, v = (x.repeat_interleave(self.config.group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.config.head_dim**0.5
        gap = torch.arange(n)[:, None] - torch.arange(n)[None]
        hidden = (gap < 0) | ((gap >= window) if window else False)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    model = reference(FAMILIES[family])
    config = DecoderConfig.from_hf(model.config.to_dict())
    decoder = Decoder(config, fuse(config, model.state_dict()))
    tokens = torch.randint(0, config.vocab, (61,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        hidden = decoder.forward(tokens, torch.arange(61), Causal(config), None)
        torch.testing.assert_close(decoder.project(hidden), expected, atol=2e-4, rtol=1e-4)


def test_what_cannot_be_computed_is_refused() -> None:
    plain = FAMILIES["llama"].to_dict()
    with pytest.raises(UserError, match="gpt2"):
        DecoderConfig.from_hf({**plain, "model_type": "gpt2"})
    with pytest.raises(UserError, match="gelu"):
        DecoderConfig.from_hf({**plain, "hidden_act": "gelu"})
    with pytest.raises(UserError, match="longrope"):
        DecoderConfig.from_hf({**plain, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}})


def test_missing_or_unexplained_weights_are_named() -> None:
    model = reference(FAMILIES["llama"])
    config = DecoderConfig.from_hf(model.config.to_dict())
    state = model.state_dict()
    with pytest.raises(UserError, match="extra"):
        fuse(config, {**state, "extra.weight": torch.zeros(1)})
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError, match="layers.1.mlp.up_proj"):
        fuse(config, state)
