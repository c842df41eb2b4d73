"""The kernels of a backward pass against the derivatives that autograd computes in float64, for any shape, and bit for
bit the same by one thread and by two."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import small
from torch import Tensor

from rookery.worker.engine.native import kernels
from rookery.worker.model.layers import rotate

if not kernels.load(None):
    pytest.skip(kernels.runtime.why_unavailable(), allow_module_level=True)

from rookery.worker.engine.native.kernels import gradients

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}
"""Of a result, relative to its row's largest number."""


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    scale = wanted.abs().amax(-1, keepdim=True).clamp(min=1e-3)
    return bool(((found.double() - wanted).abs() <= ROUNDING[dtype] * scale).all())


def by_threads(compute: Callable[[], Tensor]) -> Tensor:
    """The result of two threads, which is that of one."""
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        found.append(compute())
    assert torch.equal(*found)
    return found[1]


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), DTYPES, st.floats(-3, 3), st.integers(0, 999))
def test_norm_gradient_joins_the_stream(rows: int, vectors: int, dtype: torch.dtype, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    g, x = (torch.randn(rows, 16 * vectors).mul(10.0**size).to(dtype) for _ in range(2))
    weight, before = torch.rand(16 * vectors).to(dtype), torch.randn(rows, 16 * vectors)
    stream = before.clone()

    def compute() -> Tensor:
        stream.copy_(before)
        return gradients.add_norm_gradient(stream, g, x, weight, 1e-5)

    out, exact = by_threads(compute), x.double().requires_grad_()
    (wanted,) = torch.autograd.grad(F.rms_norm(exact, exact.shape[-1:], weight.double(), 1e-5), exact, g.double())
    assert near(stream, before.double() + wanted, torch.float32)
    assert torch.equal(out, stream.to(dtype))


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), DTYPES, st.floats(-2, 2), st.integers(0, 999))
def test_swiglu_gradient(rows: int, vectors: int, dtype: torch.dtype, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    g, y = torch.randn(rows, 16 * vectors).to(dtype), torch.randn(rows, 32 * vectors).mul(10.0**size).to(dtype)
    found, exact = by_threads(lambda: gradients.swiglu_gradient(g, y)), y.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    (wanted,) = torch.autograd.grad(F.silu(gate) * up, exact, g.double())
    assert near(found, wanted, dtype)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 20), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), DTYPES, st.booleans())
def test_heads_gradient(
    tokens: int, kv_heads: int, group: int, vectors: int, dtype: torch.dtype, rotates: bool
) -> None:
    torch.manual_seed(tokens)
    heads, size = kv_heads * group, 16 * vectors
    of_q, of_k, of_v = (torch.randn(tokens, count, size).to(dtype) for count in (heads, kv_heads, kv_heads))
    rotation = (torch.randn(tokens, 1, size).to(dtype), torch.randn(tokens, 1, size).to(dtype))
    found = by_threads(lambda: gradients.heads_gradient(of_q, of_k, of_v, rotation if rotates else None))
    exact = torch.zeros(tokens, heads + 2 * kv_heads, size, dtype=torch.float64, requires_grad=True)
    q, k, v = exact.split((heads, kv_heads, kv_heads), 1)
    if rotates:
        q, k = (rotate(part, *(turn.double() for turn in rotation)) for part in (q, k))
    (wanted,) = torch.autograd.grad((q, k, v), exact, (of_q.double(), of_k.double(), of_v.double()))
    assert near(found.view(wanted.shape), wanted, dtype)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 20), st.integers(1, 40), DTYPES, st.sampled_from([1.0, 0.3, 5.0]), st.integers(0, 999))
def test_softmax_gives_logprobs_and_their_gradient(
    rows: int, vectors: int, dtype: torch.dtype, temperature: float, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, targets = torch.randn(rows, 16 * vectors).mul(20).to(dtype), torch.randint(16 * vectors, (rows,))
    logits[0, targets[0]] = -300.0  # its probability is below the least float32
    temperatures = None if temperature == 1.0 else torch.full((rows,), temperature)
    logp, computed = torch.empty(rows), logits.clone()

    def compute() -> Tensor:
        computed.copy_(logits)
        gradients.normalise(computed, targets, temperatures, logp, derivatives=True)
        return torch.cat([computed.float(), logp[:, None]], 1)

    by_threads(compute)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    wanted, chosen = exact.exp() - F.one_hot(targets, logits.shape[1]), exact.gather(1, targets[:, None]).squeeze(1)
    assert ((logp - chosen).abs() <= 1e-6 * chosen.abs() + 1e-6).all()
    share = ROUNDING[dtype] + ROUNDING[torch.float32] * logits.abs().amax() / temperature  # the exponent is rounded
    assert ((computed.double() - wanted).abs() <= share * wanted.abs() + 2.0**-22).all()
    before = logp.clone()
    computed.copy_(logits)
    gradients.normalise(computed, targets, temperatures, logp.zero_(), derivatives=False)
    assert torch.equal(computed, logits) and torch.equal(logp, before)


def test_softmax_of_broken_rows_is_nan_there_alone() -> None:
    logits = torch.zeros(3, 32)
    logits[0, 5], logits[1, :16] = math.nan, -math.inf
    logp = torch.empty(3)
    gradients.normalise(logits, torch.tensor([1, 17, 3]), None, logp, derivatives=True)
    assert logp[0].isnan() and logits[0].isnan().any()
    assert torch.allclose(logp[1:], -torch.tensor([16.0, 32.0]).log()) and (logits[1, :16] == 0).all()


@pytest.mark.parametrize("target", [-1, 32])
def test_target_outside_the_vocabulary_raises(target: int) -> None:
    with pytest.raises(ValueError, match="vocabulary of 32"):
        gradients.normalise(torch.zeros(1, 32), torch.tensor([target]), None, torch.empty(1), derivatives=False)


def test_kernels_compute_the_softmax_of_models_whose_vocabulary_fits() -> None:
    from rookery.worker.trainer.native.kernel_pass import normalise

    decoder = copy.copy(small("llama"))  # which other tests share
    for vocabulary, chosen in ((208, gradients.normalise), (209, None)):
        decoder.vocab = vocabulary
        assert normalise(decoder) is chosen
