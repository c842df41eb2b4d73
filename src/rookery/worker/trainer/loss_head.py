"""Log-probabilities of given tokens, with derivatives, without keeping logits.

For one token, logp = z[y] − logsumexp(z) with z = h·Wᵀ/T. Its derivative by h, ((onehot(y) − softmax(z))·W)/T, does
not depend on how a loss uses logp, so it is computed in the same chunk as logp itself: logits are computed once, a
chunk at a time, and a loss's gradient by h is its gradient by logp times that row. The distribution's entropy follows:
H = −logp + h·(d logp / d h), as Σ_v (onehot − softmax)_v · z_v = z[y] − Σ_v p_v z_v.

Where a row has several targets, their gradients by logp are summed before the product: its logits are computed twice,
whatever the number of its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.packing import SoftTargets

PROJECTED_ROWS = 128
"""Rows projected to the vocabulary at once: enough for the matmul's full speed (32 rows take 1.5 times as long)."""

NORMALISED_ROWS = 32
"""Rows whose float32 logits exist at once: 6 MB at 49,152 words, which the cache holds between passes."""

GPU_ROWS = 512
"""Both, on a GPU: enough to keep it busy; their float32 logits are 310 MB at 152,000 words, in three copies."""


class Normalise(Protocol):
    """Fills ``logp`` [rows] of ``targets`` [rows] and, with derivatives, turns ``logits`` [rows, vocabulary] into
    softmax − onehot, in place."""

    def __call__(
        self, logits: Tensor, targets: Tensor, temperatures: Tensor | None, logp: Tensor, *, derivatives: bool
    ) -> None: ...


@dataclass(frozen=True)
class TokenLogprobs:
    """Per token, float32: ``logp`` [n]; with derivatives also ``slopes`` [n, hidden], d logp / d hidden, and
    ``entropy`` [n] in nats of the distribution (temperature applied). With derivatives of soft targets,
    ``soft_gradient`` instead of ``slopes``."""

    logp: Tensor
    slopes: Tensor | None
    entropy: Tensor | None
    soft_gradient: Callable[[Tensor], Tensor] | None = None

    def gradient(self, d_logp: Tensor) -> Tensor:
        """d loss / d hidden from d loss / d logp [n], in the rows of hidden that were given. Once: it overwrites
        ``slopes``."""
        if self.soft_gradient is not None:
            return self.soft_gradient(d_logp)
        assert self.slopes is not None
        return self.slopes.mul_(d_logp[:, None])


@torch.no_grad()
def token_logprobs(
    decoder: Decoder, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, *, derivatives: bool,
    normalise: Normalise | None = None,
) -> TokenLogprobs:  # fmt: skip
    """hidden [n, hidden] (input of ``Decoder.project``), targets [n] int64, temperatures [n] float32; None: all 1.
    ``normalise`` defaults to PyTorch's operations."""
    normalise = normalise or normalise_rows
    logp = torch.empty(len(hidden), dtype=_accumulation_dtype(hidden), device=hidden.device)
    slopes = torch.empty(hidden.shape, dtype=logp.dtype, device=hidden.device) if derivatives else None
    projected, normalised = (GPU_ROWS, GPU_ROWS) if hidden.is_cuda else (PROJECTED_ROWS, NORMALISED_ROWS)
    for start in range(0, len(hidden), projected):
        rows = slice(start, min(start + projected, len(hidden)))
        logits = decoder.compute_logits(hidden[rows], whole=True)
        for first in range(0, len(logits), normalised):
            chunk = slice(first, min(first + normalised, len(logits)))
            out = slice(start + chunk.start, start + chunk.stop)
            chunk_temperatures = None if temperatures is None else temperatures[out]
            normalise(logits[chunk], targets[out], chunk_temperatures, logp[out], derivatives=derivatives)
        if slopes is not None:
            slopes[rows] = logits @ decoder.head
    if slopes is None:
        return TokenLogprobs(logp, None, None)
    slopes.div_(-1.0 if temperatures is None else -temperatures[:, None])
    return TokenLogprobs(logp, slopes, torch.linalg.vecdot(hidden.to(logp.dtype), slopes).sub_(logp))


@torch.no_grad()
def soft_logprobs(
    decoder: Decoder, hidden: Tensor, soft: SoftTargets, targets: Tensor, temperatures: Tensor | None, *,
    derivatives: bool,
) -> TokenLogprobs:  # fmt: skip
    """As :func:`token_logprobs`, for targets [n] of hidden [rows, hidden] as ``soft`` states; temperatures [rows]."""
    dtype = _accumulation_dtype(hidden)
    logp, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))
    projected, normalised = (GPU_ROWS, GPU_ROWS) if hidden.is_cuda else (PROJECTED_ROWS, NORMALISED_ROWS)

    def chunks(logits: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor, slice, Tensor]]:
        """Logits from row ``start`` on, in chunks, which may be overwritten: with their log-probabilities, their
        targets, and the row of each target within the chunk."""
        for z, first in zip(logits.split(normalised), range(start, start + len(logits), normalised), strict=True):
            scaled = z if temperatures is None else z.to(dtype).div_(temperatures[first : first + len(z), None])
            yield z, torch.log_softmax(scaled, -1, dtype=dtype), *soft.of_rows(first, first + len(z))

    for start in range(0, len(hidden), projected):
        logits = decoder.compute_logits(hidden[start : start + projected], whole=True)
        for _, words, span, row in chunks(logits, start):
            logp[span] = words[row, targets[span]]
            entropy[span] = -torch.linalg.vecdot(words.exp(), words)[row]

    @torch.no_grad()
    def gradient(d_logp: Tensor) -> Tensor:
        total = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
        for start in range(0, len(hidden), projected):
            rows = slice(start, start + projected)
            logits = decoder.compute_logits(hidden[rows], whole=True)
            for z, words, span, row in chunks(logits, start):
                sums = d_logp.new_zeros(len(z)).index_add_(0, row, d_logp[span])
                d_z = words.exp_().mul_(-sums[:, None])
                d_z.view(-1).index_add_(0, row * d_z.shape[1] + targets[span], d_logp[span])
                z.copy_(d_z)
            total[rows] = logits @ decoder.head
        return total if temperatures is None else total.div_(temperatures[:, None])

    return TokenLogprobs(logp, None, entropy, gradient) if derivatives else TokenLogprobs(logp, None, None)


def normalise_rows(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, logp: Tensor, *, derivatives: bool
) -> None:
    """A ``Normalise`` on any device."""
    dtype = _accumulation_dtype(logits)
    z = logits if temperatures is None else logits.to(dtype).div_(temperatures[:, None])
    p = torch.softmax(z, -1, dtype=dtype)
    # log Σ exp(z) = max z − log max p: the likeliest token's probability cannot underflow
    logp.copy_(z.gather(1, targets[:, None]).squeeze(1).to(dtype) - z.amax(-1).to(dtype) + p.amax(-1).log())
    if derivatives:
        p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0))
        logits.copy_(p)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
