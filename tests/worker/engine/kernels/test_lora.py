"""A pass of the decoder by kernels: against float64, bit for bit the same in any batch, and with another tenant's NaN
beside it. Attention is the identity here, so that a row depends on nothing but its token and its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import COMPUTED, small
from torch import Tensor

from rookery.worker.engine.native import kernels
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter
from rookery.worker.model.adapter_slots import ResidentAdapter, padded_rank
from rookery.worker.model.config import SITES
from rookery.worker.model.decoder import Decoder, output_slices
from rookery.worker.model.lora import LoraManager

if not kernels.load(None):
    pytest.skip(kernels.runtime.why_unavailable(), allow_module_level=True)

from rookery.worker.engine.native.kernels.layer_pass import forward
from rookery.worker.engine.native.kernels.lora import KernelAdapter, LayerStages

Group = tuple[Adapter | None, int]
TARGETS = st.sampled_from([list(PARTS), ["q", "v"], ["o"], ["gate", "down"], ["k", "up"]])
ADAPTERS = st.one_of(st.none(), st.tuples(st.integers(1, 40), TARGETS, st.integers(0, 99)))


def adapter(decoder: Decoder, rank: int, targets: Sequence[str], seed: int) -> Adapter:
    made = init_adapter(decoder.config, rank, 2.0 * rank, list(targets), seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in made.weights.values():
        b.normal_(0.0, 0.2 / rank**0.5, generator=generator)
    return made


def groups_of(decoder: Decoder, drawn: Sequence[tuple[tuple[int, list[str], int] | None, int]]) -> list[Group]:
    return [(adapter(decoder, *about) if about is not None else None, count) for about, count in drawn]


def resident(decoder: Decoder, of: Adapter) -> ResidentAdapter:
    return ResidentAdapter.load(of, decoder.config, decoder.dtype, "cpu", padded_rank(of.rank))


def pack(adapter: ResidentAdapter, layers: int) -> KernelAdapter:
    return KernelAdapter.pack(adapter.rank, adapter.a, adapter.b, layers)


def run(decoder: Decoder, tokens: Tensor, groups: Sequence[Group]) -> Tensor:
    config = decoder.config
    packed = [(pack(resident(decoder, a), config.layers) if a is not None else None, count) for a, count in groups]
    with torch.no_grad():
        return forward(
            decoder, tokens, packed, lambda layer, qkv: qkv[:, : config.heads * config.head_dim].contiguous()
        )


def expected(decoder: Decoder, tokens: Tensor, groups: Sequence[Group]) -> Tensor:
    """The projections in float64."""
    config = decoder.config

    def linear(layer: int, site: str, x: Tensor) -> Tensor:
        projection = getattr(decoder.layers[layer], site)
        y = x @ projection.weight.double().T + (projection.bias.double() if projection.bias is not None else 0.0)
        at = 0
        for a, count in groups:
            for part, columns in output_slices(config, site).items():
                if a is not None and (layer, part) in a.weights:
                    down, up = (factor.double() for factor in a.weights[layer, part])
                    y[at : at + count, columns] += a.scale * (x[at : at + count] @ down.T @ up.T)
            at += count
        return y

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.eps).rsqrt() * weight.double()

    x = decoder.embedding[tokens].double()
    for i, w in enumerate(decoder.layers):
        attended = linear(i, "qkv", norm(x, w.attention_norm))[:, : config.heads * config.head_dim]
        x = x + linear(i, "o", attended)
        gate, up = linear(i, "gate_up", norm(x, w.mlp_norm)).chunk(2, -1)
        x = x + linear(i, "down", torch.nn.functional.silu(gate) * up)
    return norm(x, decoder.norm)


def tokens_for(groups: Sequence[Group], seed: int) -> Tensor:
    count = sum(count for _, count in groups)
    return torch.randint(0, 211, (count,), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(25))
@given(
    st.sampled_from(["llama", "llama biased", "qwen3"]),
    st.lists(st.tuples(ADAPTERS, st.integers(1, 19)), min_size=1, max_size=5),
)
def test_float32_agrees_with_float64(family: str, drawn: list[tuple[tuple[int, list[str], int] | None, int]]) -> None:
    decoder = small(family, torch.float32)
    groups = groups_of(decoder, drawn)
    tokens = tokens_for(groups, len(drawn))
    found = run(decoder, tokens, groups)
    torch.testing.assert_close(found.double(), expected(decoder, tokens, groups), rtol=1e-3, atol=2e-4)


@settings(max_examples=examples(25))
@given(
    st.sampled_from(["llama", "mistral window"]),
    st.lists(st.tuples(ADAPTERS, st.integers(2, 19)), min_size=2, max_size=5),
    st.data(),
)
def test_rows_are_the_same_bits_in_any_batch(
    family: str, drawn: list[tuple[tuple[int, list[str], int] | None, int]], data: st.DataObject
) -> None:
    decoder = small(family, COMPUTED)
    groups = groups_of(decoder, drawn)
    tokens = tokens_for(groups, len(drawn))
    together = run(decoder, tokens, groups)
    at = 0
    for a, count in groups:
        size = data.draw(st.integers(2, count))
        first = data.draw(st.integers(0, count - size))
        rows = slice(at + first, at + first + size)
        assert torch.equal(run(decoder, tokens[rows], [(a, size)]), together[rows])
        at += count


@settings(max_examples=examples(15))
@given(
    st.sampled_from([torch.nan, torch.inf, -torch.inf, 3e38]),
    st.integers(1, 33),
    st.sampled_from(list(SITES)),
    st.integers(0, 1),
    st.integers(1, 11),
)
def test_numbers_of_one_adapter_stay_in_its_rows(value: float, rank: int, site: str, factor: int, rows: int) -> None:
    decoder = small("llama", COMPUTED)
    good, other = adapter(decoder, 16, PARTS, 1), adapter(decoder, rank, PARTS, 2)
    counts = (3, rows, 4, 2)
    groups: list[Group] = list(zip((good, other, None, good), counts, strict=True))
    tokens = tokens_for(groups, rows)
    before = run(decoder, tokens, groups)
    other.weights[1, SITES[site][0]][factor].view(-1)[-1] = value
    after = run(decoder, tokens, groups)
    assert not after[3 : 3 + rows].equal(before[3 : 3 + rows])
    assert after[:3].equal(before[:3]) and after[3 + rows :].equal(before[3 + rows :])


def test_stages_raise_for_inputs_that_do_not_fit() -> None:
    decoder = small("llama", COMPUTED)
    residual = torch.zeros(4, 64, dtype=decoder.dtype)
    with pytest.raises(ValueError, match="3 of 4 tokens"):
        LayerStages(decoder, residual, [(None, 3)])
    with pytest.raises(ValueError, match="does not lie within 4 rows"):
        LayerStages(decoder, residual, [(None, 3), (None, 2)])
    with pytest.raises(ValueError, match="a kernel needs"):
        LayerStages(decoder, residual[:, :32], [(None, 4)])
    short = KernelAdapter(16, torch.zeros(1, 4, 2, dtype=torch.int64), [])
    with pytest.raises(ValueError, match="a kernel needs"):
        LayerStages(decoder, residual, [(short, 4)])
    stages = LayerStages(decoder, residual, [(None, 4)])
    with pytest.raises(ValueError, match="a kernel needs"):
        stages.swiglu(torch.zeros(4, 64, dtype=decoder.dtype), (0, "gate_up"), (0, "down"))
    with pytest.raises(ValueError, match="a kernel needs"):
        stages.norm(decoder.norm, torch.zeros(5, 64, dtype=decoder.dtype), None, None)


def test_packing_an_adapter_keeps_its_size() -> None:
    decoder = small("llama", torch.float32)
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
    loras.add("a", adapter(decoder, 20, ["q", "v", "down"], 1))
    size = loras.bytes
    packed = loras.packed("a", partial(KernelAdapter.pack, layers=decoder.config.layers))
    assert loras.bytes == size == packed.bytes and not loras.residents["a"].a
