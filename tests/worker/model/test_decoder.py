"""The decoder against transformers in float32: random small models of every family, and SmolLM2 itself."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tests.support.tiny import FAMILIES, reference, small, smollm2, smollm2_folder
from torch import Tensor

from rookery.errors import UserError
from rookery.tokenization.registry import CONFIG
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.layers import PackedLinear
from rookery.worker.model.published import fuse


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


def logits(decoder: Decoder, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        hidden = decoder.forward(tokens, torch.arange(len(tokens)), Causal(decoder.config), None)
        return decoder.compute_logits(hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    tokens = torch.randint(0, 211, (61,))
    with torch.no_grad():
        expected = reference(family)(tokens[None]).logits[0]
    torch.testing.assert_close(logits(small(family, torch.float32), tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.heavy
def test_smollm2_equals_transformers() -> None:
    decoder = smollm2(torch.float32)
    raw = json.loads((smollm2_folder() / CONFIG).read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**raw), dtype=torch.float32)
    model = model.to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffer was not materialised
    config = decoder.config
    sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
    published = {"model.embed_tokens.weight": decoder.embedding, "model.norm.weight": decoder.norm}
    for i, layer in enumerate(decoder.layers):
        gate, up = layer.gate_up.weight.chunk(2)
        q, k, v = layer.qkv.weight.split(sizes)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        parts |= {"self_attn.o_proj": layer.o.weight}
        parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": layer.down.weight}
        parts |= {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        published |= {f"model.layers.{i}.{name}.weight": weight for name, weight in parts.items()}
    missing, unexpected = model.load_state_dict(published, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    tokens = torch.randint(0, config.vocab, (200,))
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(logits(decoder, tokens), expected, atol=5e-3, rtol=1e-4)


def test_operations_that_cannot_be_computed_are_refused() -> None:
    plain = FAMILIES["llama"].to_dict()
    with pytest.raises(UserError, match="gpt2"):
        DecoderConfig.from_hf({**plain, "model_type": "gpt2"})
    with pytest.raises(UserError, match="gelu"):
        DecoderConfig.from_hf({**plain, "hidden_act": "gelu"})
    with pytest.raises(UserError, match="longrope"):
        DecoderConfig.from_hf({**plain, "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}})


def test_rope_fields_of_the_older_generation_mean_the_same() -> None:
    for family in ("llama 3.1 rope", "qwen2 yarn", "llama linear rope"):
        raw = FAMILIES[family].to_dict()
        new = DecoderConfig.from_hf(raw)
        scaling = dict(raw.pop("rope_parameters"))
        old = {
            **raw,
            "rope_theta": scaling.pop("rope_theta"),
            "rope_scaling": {**scaling, "type": scaling["rope_type"]},
        }
        assert DecoderConfig.from_hf(old) == new


def test_missing_or_unexplained_weights_are_named() -> None:
    model = reference("llama")
    config = DecoderConfig.from_hf(model.config.to_dict())
    state = model.state_dict()
    with pytest.raises(UserError, match="extra"):
        fuse(config, {**state, "extra.weight": torch.zeros(1)})
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj"):
        fuse(config, state)


def test_rope_tables_grow_without_changing() -> None:
    first, second = small("llama"), Decoder.__new__(Decoder)
    second.__dict__.update(first.__dict__)
    near = torch.arange(5)
    before = [x.clone() for x in first.rotation(near)]
    second.rotation(torch.tensor([3000]))
    for old, new in zip(before, second.rotation(near), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [2, 3, 8, 33, 64, 130, 777])
def test_a_packed_projection_is_the_plain_one_bit_for_bit(rows: int, biased: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((960, 576), (960,), (rows, 576), (rows, 960))
    weight, bias, x, g = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    both = []
    for pack in (False, True):
        read = x.clone().requires_grad_()
        projection = PackedLinear(weight, bias if biased else None, pack=pack)
        with torch.no_grad():
            served = projection(read)
        trained = projection(read)
        trained.backward(g)
        assert torch.equal(served, trained)
        both.append((served, read.grad))
    (plain, plain_gradient), (packed, packed_gradient) = both
    assert torch.equal(plain, packed) and torch.equal(plain_gradient, packed_gradient)
