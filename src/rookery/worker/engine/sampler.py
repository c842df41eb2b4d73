"""Keyed Gumbel-max sampling.

Promises:

* A token is a function of (logits, temperature, seed, position); the other rows of the batch do not affect it.
* Its distribution over seeds is exactly softmax(logits / temperature): argmax of log-probability plus independent
  Gumbel noise (Gumbel 1954; Maddison et al., arXiv:1411.0030). Only tokens within ``NEAR_NATS`` of the maximum get
  their own noise. All others together are one pseudo-token with their summed probability; when it wins, the same rule
  chooses among them, with noise of another key. By the max-stability of the Gumbel distribution that is the same law.
* Small differences in logits seldom change the token, since the noise belongs to the token, not to a rank or a sum.
* The reported log-probability is that of the distribution sampled from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NEAR_NATS = 8.0
"""Tokens at least e⁻⁸ times as likely as the likeliest get their own noise: some hundreds of a vocabulary, while the
pseudo-token, which costs a pass over the vocabulary, wins in about one draw of a hundred."""

STEP = np.uint64(0x9E3779B97F4A7C15)
MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Multipliers of SplitMix64's finaliser."""

REST_KEY = np.uint64(1) << np.uint64(63)
"""Separates the draw among the unlikely tokens from the draw that the pseudo-token won."""


@dataclass(frozen=True)
class SamplingKey:
    """Seed, position and temperature of one draw. ``position`` counts from the request's first answer token."""

    seed: int
    position: int
    temperature: float


@dataclass(frozen=True)
class SampledTokens:
    """tokens [rows] and natural log-probabilities [rows] float32; NaN where a row's logits are no distribution."""

    tokens: list[int]
    logprobs: list[float]


def sample(logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
    """One token for each key from ``logits`` [rows, vocab], computed where they are: one token, log-probability and
    flag per row come from the device. Rows beyond the keys are padding."""
    count, device = len(keys), logits.device
    logits = logits[: max(2, count)]  # the vocabulary of a lone row would be summed in another order
    temperatures = [key.temperature for key in keys] + [0.0] * (len(logits) - count)
    host = np.stack([np.array(temperatures).view(np.int64), np.resize(row_keys(keys).view(np.int64), len(logits))])
    sent = torch.from_numpy(host).to(device)
    temperature, noise_keys = sent[0].view(torch.float64), sent[1, :count]
    random = temperature[:count] > 0
    p = torch.softmax(logits / torch.where(temperature > 0, temperature, 1.0).float()[:, None], -1)  # float32
    rows, tokens = (p >= p.amax(-1, keepdim=True) * math.exp(-NEAR_NATS))[:count].nonzero().T
    likely = p[rows, tokens].double().log()
    p[rows, tokens] = 0.0
    scores = likely + torch.where(random[rows], _gumbel(noise_keys[rows], tokens), 0.0)
    best, winner = _best(scores, rows, count)
    # where the logits are NaN no token is near the maximum: token 0, NaN
    chosen = torch.cat((tokens, tokens.new_zeros(1)))[winner]
    logprob = torch.cat((likely, likely.new_full((1,), torch.nan)))[winner]
    pseudo = p.sum(-1)[:count].double().log() + _gumbel(noise_keys, torch.full_like(noise_keys, -1))
    from_rest = random & (pseudo > best) & ~logprob.isnan()
    answer = torch.stack((chosen.double(), logprob, from_rest.double())).cpu()  # tokens are exact in float64
    sampled = SampledTokens([int(x) for x in answer[0].tolist()], answer[1].tolist())
    if rest_rows := answer[2].nonzero()[:, 0].tolist():
        index = torch.tensor(rest_rows, device=device)
        rest = p[index].double().log()
        every = torch.arange(rest.shape[1], device=device).expand_as(rest)
        token = (rest + _gumbel((noise_keys[index] ^ _signed(REST_KEY))[:, None], every)).argmax(-1)
        back = torch.stack((token.double(), rest.gather(1, token[:, None])[:, 0])).cpu().tolist()
        for row, at, value in zip(rest_rows, *back, strict=True):
            sampled.tokens[row], sampled.logprobs[row] = int(at), value
    return sampled


def _best(scores: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Per row its largest score [count] and that one's index in ``scores`` [n]; −inf and n for a row without scores."""
    best = scores.new_full((count,), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    at = torch.where(scores == best[rows], torch.arange(len(rows), device=rows.device), len(rows))
    return best, torch.full_like(best, len(rows), dtype=torch.int64).scatter_reduce_(0, rows, at, "amin")


def row_keys(keys: Sequence[SamplingKey]) -> np.ndarray:
    """The noise key [rows] uint64 of each (seed, position)."""
    seeds = np.array([key.seed & 0xFFFFFFFFFFFFFFFF for key in keys], dtype=np.uint64)
    positions = np.array([key.position for key in keys], dtype=np.uint64)
    return _mix(_mix(seeds + STEP) + positions * STEP)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * MIX[0]
    x = (x ^ (x >> np.uint64(27))) * MIX[1]
    return x ^ (x >> np.uint64(31))


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise of (key, token): the token-th output of SplitMix64 (Steele et al., OOPSLA 2014) started at
    the key, as a uniform in (0, 1) of 53 bits. Integers are int64, whose arithmetic wraps as that of uint64."""
    bits = keys + (tokens + 2) * _signed(STEP)
    bits = (bits ^ _shifted(bits, 30)) * _signed(MIX[0])
    bits = (bits ^ _shifted(bits, 27)) * _signed(MIX[1])
    uniform = (_shifted(bits ^ _shifted(bits, 31), 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by with zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: np.uint64) -> int:
    """The int64 of the same bits."""
    return int(number.astype(np.int64))
