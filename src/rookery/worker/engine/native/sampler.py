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
    """One token for each key from ``logits`` [rows, vocab]; rows beyond the keys are padding."""
    temperatures = [key.temperature or 1.0 for key in keys] + [1.0] * (len(logits) - len(keys))
    if any(t != 1.0 for t in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)  # float32
    p = torch.softmax(logits, -1, dtype=torch.float32)
    at, near = _near(p)
    rows, tokens = at.cpu().numpy().T
    p[at[:, 0], at[:, 1]] = 0.0
    likely, rests = near.double().log().cpu().numpy(), p.sum(-1).double().cpu().numpy()
    bounds = np.searchsorted(rows, np.arange(len(keys) + 1))
    noise_keys = row_keys(keys)
    noise = gumbel(noise_keys[np.minimum(rows, len(keys) - 1)], tokens)
    chosen, logprobs = [], []
    for i, key in enumerate(keys):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:  # NaN: no token is near the maximum
            chosen.append(0)
            logprobs.append(math.nan)
            continue
        candidates = likely[begin:end] + (noise[begin:end] if key.temperature else 0.0)
        best = int(candidates.argmax())
        token, logprob = int(tokens[begin + best]), float(likely[begin + best])
        if key.temperature and rests[i] > 0:
            pseudo = math.log(rests[i]) + gumbel(noise_keys[i : i + 1], np.array([-1]))[0]
            if pseudo > candidates[best]:
                token, logprob = _sample_rest(p[i], noise_keys[i])
        chosen.append(token)
        logprobs.append(logprob)
    return SampledTokens(chosen, logprobs)


def _near(p: Tensor) -> tuple[Tensor, Tensor]:
    """Where the likely tokens are ([n, 2], in order of rows) and their probabilities [n]."""
    at = (p >= p.amax(-1, keepdim=True) * math.exp(-NEAR_NATS)).nonzero()
    return at, p[at[:, 0], at[:, 1]]


def _sample_rest(rest: Tensor, key: np.uint64) -> tuple[int, float]:
    """A draw among the unlikely tokens: token and log-probability. ``rest`` [vocab] is 0 for the likely ones."""
    p = rest.double().cpu().numpy()
    far = np.nonzero(p)[0]
    logp = np.log(p[far])
    best = int((logp + gumbel(np.array([key ^ REST_KEY]), far)).argmax())
    return int(far[best]), float(logp[best])


def row_keys(keys: Sequence[SamplingKey]) -> np.ndarray:
    """The noise key [rows] uint64 of each (seed, position)."""
    seeds = np.array([key.seed & 0xFFFFFFFFFFFFFFFF for key in keys], dtype=np.uint64)
    positions = np.array([key.position for key in keys], dtype=np.uint64)
    return _mix(_mix(seeds + STEP) + positions * STEP)


def gumbel(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of (key, token): the token-th output of SplitMix64 (Steele et al., OOPSLA 2014) started at
    the key, as a uniform in (0, 1) of 53 bits."""
    bits = _mix(keys + (tokens.astype(np.uint64) + np.uint64(2)) * STEP)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * MIX[0]
    x = (x ^ (x >> np.uint64(27))) * MIX[1]
    return x ^ (x >> np.uint64(31))
