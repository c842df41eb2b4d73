"""The vector operations against NumPy, and the product against float64, for any rows, columns and depth."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.worker.engine.native.kernels import runtime

if runtime.why_unavailable():
    pytest.skip(runtime.why_unavailable(), allow_module_level=True)

from rookery.worker.engine.native.kernels import product, vec


def _product(args: int) -> None:
    read = vec.read_int
    blocks, rows, depth, vectors, half = read(args, 2), read(args, 3), read(args, 4), read(args, 5), read(args, 6)
    x, w, out = read(args, 7), read(args, 8), read(args, 9)
    while True:
        block = vec.fetch_increment(args, 0)
        if block >= blocks:
            break
        here, there = x + 4 * block * rows * depth, out + 4 * block * rows * 16 * vectors
        product.multiply(here, depth, rows, w, 16 * vectors, 16, depth, there, 16 * vectors, vectors, half)


def _elementwise(args: int) -> None:
    a, b, out = vec.read_int(args, 2), vec.read_int(args, 3), vec.read_int(args, 4)
    if vec.fetch_increment(args, 0) == 0:
        x, y = vec.load(a, 0, 0), vec.load(b, 0, 0)
        vec.store(out, 0, vec.exp(x), 0)
        vec.store(out, 16, (x + y) * x - y / x, 0)
        vec.store(out, 32, vec.fma(x, y, vec.splat(3.0)), 0)
        vec.store(out, 48, vec.splat(vec.sum_lanes(x)), 0)
        vec.store(out, 64, vec.splat(vec.max_lanes(y)), 0)
        vec.store(out, 80, vec.rounded(x, 1), 0)
        vec.store(out, 96, vec.where_less(x, y, x, y), 0)
        vec.store(out, 112, vec.where_nan(x, y, x), 0)


@cache
def kernels() -> tuple[runtime.Kernel, runtime.Kernel]:
    both = runtime.Kernel(_product), runtime.Kernel(_elementwise)
    runtime.load(both, None)
    return both


def multiplied(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
    """``out`` + x · w, with ``block`` rows in each block."""
    (rows, depth), columns, out = x.shape, w.shape[1], out.clone()
    arguments = runtime.Arguments()
    for number in (rows // block, block, depth, columns // 16, int(w.dtype == torch.bfloat16)):
        arguments.number(number)
    arguments.tensor(x, torch.float32, rows, depth).tensor(w, w.dtype, depth, columns)
    kernels()[0](arguments.tensor(out, torch.float32, rows, columns))
    return out


@settings(max_examples=examples(40), deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 17),
    st.integers(1, 70),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
def test_product_is_exact_for_any_shape_and_block(
    blocks: int, block: int, depth: int, vectors: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(blocks * block, depth), torch.randn(depth, 16 * vectors).to(dtype)
    out = torch.randn(blocks * block, 16 * vectors)
    found = multiplied(x, w, out, block)
    expected = out.double() + x.double() @ w.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)
    assert torch.equal(found, multiplied(x, w, out, 1)), "the block's size matters"
    narrow = multiplied(x, w[:, -16:].contiguous(), out[:, -16:].contiguous(), block)
    assert torch.equal(found[:, -16:], narrow), "the number of columns matters"


def test_operations_agree_with_numpy() -> None:
    generator = np.random.default_rng(1)
    for scale in (1e-6, 1.0, 20.0):
        x, y = (torch.from_numpy(generator.normal(size=16).astype(np.float32) * scale) for _ in range(2))
        out = torch.zeros(8, 16)
        arguments = runtime.Arguments().tensor(x, torch.float32, 16).tensor(y, torch.float32, 16)
        kernels()[1](arguments.tensor(out, torch.float32, 8, 16))
        expected = torch.stack(
            [
                x.double().exp().float(),
                (x + y) * x - y / x,
                (x.double() * y.double() + 3.0).float(),
                x.double().sum().float().expand(16),
                y.max().expand(16),
                x.bfloat16().float(),
                torch.minimum(x, y),
                x,
            ]
        )
        torch.testing.assert_close(out, expected, rtol=3e-7, atol=2e-6 * scale)
        assert torch.equal(out[5:], expected[5:])


def test_exp_and_rounding_at_the_edges() -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, 87.9, -86.9, 100.0, -100.0, torch.inf, -torch.inf, torch.nan] + [1.0] * 6)
    out = torch.zeros(8, 16)
    arguments = runtime.Arguments().tensor(x, torch.float32, 16).tensor(x, torch.float32, 16)
    kernels()[1](arguments.tensor(out, torch.float32, 8, 16))
    expected = x.double().exp().float()
    expected[6] = 0.0
    torch.testing.assert_close(out[0], expected, rtol=3e-7, atol=0.0, equal_nan=True)
    torch.testing.assert_close(out[5], x.bfloat16().float(), rtol=0.0, atol=0.0, equal_nan=True)
