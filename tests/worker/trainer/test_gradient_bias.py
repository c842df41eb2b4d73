"""The gradient in bfloat16 is not shorter than in float32: its projection on that, by layer, where sampling noise is
small enough to show a bias. Rounding to nearest has none; truncation, or sums that lose small terms, have one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from rookery import protocol
from rookery.worker.model.adapter import PARTS, init_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.convert import fuse
from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.native.attention import ChunkedAttention, ChunkSizes
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.optim import AdapterExport
from rookery.worker.trainer.packed_trainer import PackedTrainer
from rookery.worker.trainer.packing import PackedGroup, pack_groups

LAYERS, RANK, VOCAB = 12, 8, 211
CONFIG = transformers.LlamaConfig(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
REF = protocol.AdapterRef(policy="p", version=0, hash="v0", rank=RANK, alpha=2.0 * RANK)


def decoder(dtype: torch.dtype) -> Decoder:
    """Weights that bfloat16 holds, in ``dtype``."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0, 0.1)
    weights = {name: weight.detach().bfloat16().to(dtype) for name, weight in model.state_dict().items()}
    config = DecoderConfig.from_hf(CONFIG.to_dict())
    return Decoder(config, fuse(config, weights))


def groups() -> list[protocol.SharedPrefixGroup]:
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    def member() -> protocol.GroupMember:
        ones = [1.0] * 24
        return protocol.GroupMember(tokens=tokens(24), logprobs=ones, advantages=ones, weights=ones)

    return [protocol.SharedPrefixGroup(prompt=tokens(16), members=[member() for _ in range(4)]) for _ in range(8)]


def gradients(of: Decoder, folder: Path, *, compiled: bool) -> dict[int, Tensor]:
    """By layer."""
    trainer = PackedTrainer(NativeBackbone(of, compiled=compiled), max_rank=RANK, slice_tokens=512)
    trainer.load("p", 1, REF, folder)
    op = protocol.ForwardBackward(
        op="o", policy="p", tenant="t", lease=1, parent=REF, steps=0, batch_ticket="",
        loss=protocol.Loss(name="cross_entropy"), temperature=1.0,
    )  # fmt: skip
    trainer.forward_backward(op, protocol.TrainingBatch(groups=groups()))
    while trainer.queue.step():
        pass
    named = list(trainer.held["p"].state.named_gradients())
    return {
        layer: torch.cat([gradient.flatten() for name, gradient in named if name.startswith(f"{layer}.")])
        for layer in range(LAYERS)
    }


def projection(found: Tensor, wanted: Tensor) -> float:
    """The length of ``found`` along ``wanted``, as a share of that one's."""
    found, wanted = found.double().flatten(), wanted.double().flatten()
    return float(found @ wanted / (wanted @ wanted))


@pytest.mark.parametrize("compiled", [True, False])
def test_no_layer_has_a_shorter_gradient_than_in_float32(tmp_path: Path, compiled: bool) -> None:
    config = DecoderConfig.from_hf(CONFIG.to_dict())
    AdapterExport(init_adapter(config, RANK, 2.0 * RANK, list(PARTS), 0)).write(tmp_path)
    wanted = gradients(decoder(torch.float32), tmp_path, compiled=False)
    found = gradients(decoder(torch.bfloat16), tmp_path, compiled=compiled)
    by_layer = [projection(found[layer], wanted[layer]) for layer in range(LAYERS)]
    assert all(abs(share - 1) < 5e-3 for share in by_layer), by_layer
    assert abs(sum(by_layer) / LAYERS - 1) < 2e-3, by_layer


@pytest.mark.parametrize("strength", [1.0, 8.0])
def test_gradient_of_attention_is_as_long_as_that_in_float64(strength: float) -> None:
    """Also where scores are large: in bfloat16 a score of 40 is off by up to an eighth."""
    of = decoder(torch.bfloat16)
    batch = pack_groups([PackedGroup.from_group(group) for group in groups()], of.device)
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int, scale: float) -> Tensor:
        return (scale * torch.randn(len(batch.tokens), heads, of.config.head_dim, generator=generator)).bfloat16()

    q, k = drawn(of.config.heads, strength**0.5), drawn(of.config.kv_heads, strength**0.5)
    v, d_out = drawn(of.config.kv_heads, 1.0), drawn(of.config.heads, 1.0)
    found = ChunkedAttention(of, batch, ChunkSizes()).gradients(0, q, k, v, d_out)
    wide = decoder(torch.float64)
    wanted = ChunkedAttention(wide, batch, ChunkSizes()).gradients(0, *(x.double() for x in (q, k, v, d_out)))
    for name, ours, theirs in zip("qkv", found, wanted, strict=True):
        assert abs(projection(ours, theirs) - 1) < 1e-3, name
        assert (ours.double() - theirs).norm() < 1e-2 * theirs.norm(), name
