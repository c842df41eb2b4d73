"""The rules of ``worker/model/batch_invariance.py``, on sums that cancel: the rest is rounding, which shows the order
of additions. In bfloat16, in which workers compute, and by the shapes of models. A divided product gives the same
result as the whole, on any processor and in short pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.tiny import divide
from torch import Tensor

from rookery.worker.engine.native.attention import weighted_sum
from rookery.worker.model.batch_invariance import (
    CAPS,
    LANES,
    amx_enabled,
    chunked_matmul,
    contraction_chunks,
    disable_amx_if_unsafe,
    exact_key_capacity,
    exact_rows,
    pad_rows,
)
from rookery.worker.model.decoder import best_dtype
from rookery.worker.model.layers import PackedLinear

DTYPE = best_dtype()
THREADS = [1, 2, 3, 4, 8]
rule = pytest.mark.skipif(torch.bfloat16 != DTYPE, reason="these rules are bfloat16's")


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cancelling(rows: int, depth: int, out: int, *lead: int) -> tuple[Tensor, Tensor]:
    """x [..., rows, depth] and w [..., depth, out] whose product is zero but for rounding."""
    generator = torch.Generator().manual_seed(depth * out)
    x = torch.randn(*lead, rows, depth // 2, generator=generator)
    w = torch.randn(*lead, depth // 2, out, generator=generator)
    order = torch.randperm(depth, generator=generator)
    x, w = torch.cat((x, x), -1)[..., order], torch.cat((w, -w), -2)[..., order, :]
    return x.to(DTYPE), w.to(DTYPE)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of unequal size."""
    divide(monkeypatch, depth=24, rows=8)


@rule
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("shape", [(576, 960), (576, 576), (576, 3072), (1536, 576), (2048, 1024)])
def test_a_projection_by_rows(threads: int, shape: tuple[int, int], pack: bool) -> None:
    """The same bits in streams of 2 to 70 rows, wherever a row stands in them, by any number of threads."""
    x, w = cancelling(160, *shape)
    projection = PackedLinear(w.t().contiguous(), pack=pack)
    torch.set_num_threads(1)
    wanted = torch.cat([projection(part) for part in x.split(4)])
    torch.set_num_threads(threads)
    assert wanted.count_nonzero() > wanted.numel() / 2, "these sums show nothing"
    for rows in [*range(2, 40), 48, 63, 64, 65, 70]:
        for start in (0, 90):
            assert torch.equal(projection(x[start : start + rows]), wanted[start : start + rows]), rows


@rule
@pytest.mark.parametrize("groups", [1, 2, 4, 12])
@pytest.mark.parametrize("shape", [(576, 16), (576, 48), (1536, 16), (16, 576), (48, 960), (32, 3072)])
def test_the_products_of_adapters_by_rows(threads: int, shape: tuple[int, int], groups: int) -> None:
    x, w = cancelling(96, *shape, groups)
    # as the loras keeps them
    pieces = [piece.mT.contiguous().mT for piece in w.split(contraction_chunks(shape[0], w.dtype, w.device), 1)]
    least = min(piece.shape[1] for piece in pieces), shape[1]

    def product(rows: int) -> Tensor:
        padded = pad_rows(x[:, :rows], exact_rows(DTYPE, rows, least))
        if groups == 1:  # as for one adapter alone, and for all as one
            return chunked_matmul(padded[0], [piece[0] for piece in pieces])[None, :rows]
        return chunked_matmul(padded, pieces)[:, :rows]

    torch.set_num_threads(1)
    wanted = product(96)
    torch.set_num_threads(threads)
    for rows in [*range(1, 34), 48, 64, 95]:
        assert torch.equal(product(rows), wanted[:, :rows]), rows


@rule
@pytest.mark.parametrize("rank", [16, 32, 64])
def test_one_row_among_zeros(threads: int, rank: int) -> None:
    """Wherever an adapter's middle stands among those of others, all zero, it gives the same.
    Ranks are those of the manager."""
    x, w = cancelling(40, rank, 576)
    torch.set_num_threads(1)
    wanted = chunked_matmul(x, [w])
    torch.set_num_threads(threads)
    for wide in (rank, 128, 192, 384):
        for start in range(0, wide - rank + 1, rank):
            among, below = x.new_zeros(40, wide), w.new_zeros(wide, 576)
            among[:, start : start + rank], below[start : start + rank] = x, w
            assert torch.equal(chunked_matmul(among, [below]), wanted), (wide, start)


@rule
@pytest.mark.parametrize("batch", [3, 12, 96])
@pytest.mark.parametrize("rows", [3, 9, 33, 171])
def test_the_values_of_attention_by_keys(threads: int, batch: int, rows: int) -> None:
    """Zeros behind the keys change nothing, whatever the capacity."""
    length, size = 300, 64
    rows = exact_rows(DTYPE, rows, (LANES, size))
    weights, values = cancelling(rows, length, size, batch)
    results = []
    torch.set_num_threads(1)
    for capacity in dict.fromkeys(exact_key_capacity(DTYPE, keys) for keys in (length, 500, 800, 1500)):
        wide, keys = weights.new_zeros(batch, rows, capacity), values.new_zeros(batch, capacity, size)
        wide[..., :length], keys[:, :length] = weights, values
        results.append(weighted_sum(wide, keys, torch.empty(batch, rows, size, dtype=DTYPE)))
        torch.set_num_threads(threads)
    assert results[0].count_nonzero() > 0, "these sums show nothing"
    for result in results[1:]:
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("rows", [1, 8, 9, 33])
@pytest.mark.parametrize("pack", [True, False])
def test_a_projection_in_blocks(in_pieces: None, rows: int, pack: bool) -> None:
    """In float32, as many rows as make one block or several, with its derivative."""
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(40, 64), torch.randn(40), torch.randn(rows, 64, requires_grad=True)
    weights = torch.randn(rows, 40)
    got = PackedLinear(weight, bias, pack=pack)(x)
    (got * weights).sum().backward()
    wanted = x.detach().double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(got.detach().double(), wanted, atol=2e-5, rtol=1e-5)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), weights.double() @ weight.double(), atol=2e-5, rtol=1e-5)


def test_attention_in_pieces_of_the_keys(in_pieces: None) -> None:
    weights, values = torch.rand(3, 7, 64), torch.randn(3, 64, 16)
    assert len(contraction_chunks(64, values.dtype, "cpu")) == 3
    got = weighted_sum(weights, values, torch.empty(3, 7, 16))
    torch.testing.assert_close(got.double(), weights.double() @ values.double(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("known", [(9, [(4096, 4096)], 192), (8, [(576, 448)], 192), (2, [(64, 64)], 768)])
def test_where_tiles_are_not_exact_they_are_left_alone(known: tuple[int, list[tuple[int, int]], int]) -> None:
    name, older = CAPS
    environment: dict[str, str] = {}
    assert not disable_amx_if_unsafe(*known, environment, lambda: False) and not environment, "there are none"
    for exact in ((8, [(1536, 576), (64, 64)], 192), (32, [(64, 64)], 192)):
        assert not disable_amx_if_unsafe(*exact, environment, lambda: True) and not environment, "they are exact"
    environment[older] = "AVX2"
    assert not disable_amx_if_unsafe(*known, environment, lambda: True)
    assert environment == {older: "AVX2"}, "somebody said what it shall use"
    environment = {name: ""}
    assert disable_amx_if_unsafe(*known, environment, lambda: True)
    assert environment == {name: "AVX512_CORE_BF16"}


@pytest.mark.parametrize(
    ("environment", "enabled"),
    [
        ({}, True), ({CAPS[0]: "AVX512_CORE_BF16"}, False), ({CAPS[0]: "avx512_core_amx"}, True),
        ({CAPS[1]: "AVX2"}, False),
    ],
)  # fmt: skip
def test_a_limit_on_instructions_is_read_from_the_environment(environment: dict[str, str], enabled: bool) -> None:
    assert amx_enabled(environment, lambda: True) == enabled
    assert not amx_enabled(environment, lambda: False)
