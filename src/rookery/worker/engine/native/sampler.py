"""Keyed Gumbel-max sampling.

Promises:

* A token is a function of (logits, temperature, seed, position): whoever else is in the batch does not matter.
* Its distribution over seeds is exactly softmax(logits / temperature): argmax of log-probability plus independent
  Gumbel noise (Gumbel 1954; Maddison et al., arXiv:1411.0030). Only tokens within ``NEAR_NATS`` of the maximum get
  noise of their own. All others together are one pseudo-token with their summed probability; when it wins, the same
  rule chooses inside, with noise of another key. By the max-stability of the Gumbel distribution that is the same
  law.
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
pseudo-token, whose inside costs a pass over the vocabulary, wins in about one draw of a hundred."""

_BLOCK = 128
"""Tokens that are looked at together; vocabularies are padded to multiples of it (where not, blocks are smaller)."""

STEP = np.uint64(0x9E3779B97F4A7C15)
INSIDE = np.uint64(1) << np.uint64(63)
"""Separates the draw inside the pseudo-token from the draw that the pseudo-token won."""


@dataclass(frozen=True)
class SamplingKey:
    """What a row samples with. ``position`` counts from the request's first answer token."""

    seed: int
    position: int
    temperature: float


@dataclass(frozen=True)
class Sampled:
    """tokens [rows] and natural log-probabilities [rows] float32; NaN where a row's logits are no distribution."""

    tokens: list[int]
    logprobs: list[float]


def sample(logits: Tensor, draws: Sequence[SamplingKey]) -> Sampled:
    """One token for each draw from ``logits`` [rows, vocab]; rows beyond the draws are padding."""
    warmth = [d.temperature or 1.0 for d in draws] + [1.0] * (len(logits) - len(draws))
    if any(t != 1.0 for t in warmth):
        logits = logits / torch.tensor(warmth, device=logits.device).unsqueeze(1)  # float32
    p = torch.softmax(logits, -1, dtype=torch.float32)
    at, near = _near(p)
    rows, tokens = at.cpu().numpy().T
    p[at[:, 0], at[:, 1]] = 0.0
    likely, rests = near.double().log().cpu().numpy(), p.sum(-1).double().cpu().numpy()
    bounds = np.searchsorted(rows, np.arange(len(draws) + 1))
    keys = row_keys(draws)
    noise = gumbel(keys[np.minimum(rows, len(draws) - 1)], tokens)
    chosen, logprobs = [], []
    for i, draw in enumerate(draws):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:  # not a number: no token is near the maximum
            chosen.append(0)
            logprobs.append(math.nan)
            continue
        candidates = likely[begin:end] + (noise[begin:end] if draw.temperature else 0.0)
        best = int(candidates.argmax())
        token, logprob = int(tokens[begin + best]), float(likely[begin + best])
        if draw.temperature and rests[i] > 0:
            pseudo = math.log(rests[i]) + gumbel(keys[i : i + 1], np.array([-1]))[0]
            if pseudo > candidates[best]:
                token, logprob = _inside(p[i], keys[i])
        chosen.append(token)
        logprobs.append(logprob)
    return Sampled(chosen, logprobs)


def _near(p: Tensor) -> tuple[Tensor, Tensor]:
    """Where the likely tokens are ([n, 2], in order of rows) and their probabilities [n]. Blocks are looked at first,
    since most hold no likely token and a pass over single tokens is the dearest part of sampling."""
    rows, vocabulary = p.shape
    size = math.gcd(vocabulary, _BLOCK)
    blocks = p.view(rows, -1, size)
    tops = blocks.amax(-1)
    bar = tops.amax(-1, keepdim=True) * math.exp(-NEAR_NATS)
    hits = (tops >= bar).nonzero()
    inside = blocks[hits[:, 0], hits[:, 1]]
    found = (inside >= bar[hits[:, 0]]).nonzero()
    block = hits[found[:, 0]]
    at = torch.stack((block[:, 0], block[:, 1] * size + found[:, 1]), 1)
    return at, inside[found[:, 0], found[:, 1]]


def _inside(rest: Tensor, key: np.uint64) -> tuple[int, float]:
    """A draw among the unlikely tokens; ``rest`` [vocab] is 0 for the others. Token and log-probability."""
    p = rest.double().cpu().numpy()
    far = np.nonzero(p)[0]
    likely = np.log(p[far])
    best = int((likely + gumbel(np.array([key ^ INSIDE]), far)).argmax())
    return int(far[best]), float(likely[best])


def row_keys(draws: Sequence[SamplingKey]) -> np.ndarray:
    seeds = np.array([d.seed & 0xFFFFFFFFFFFFFFFF for d in draws], dtype=np.uint64)
    positions = np.array([d.position for d in draws], dtype=np.uint64)
    return _mix(_mix(seeds + STEP) + positions * STEP)


def gumbel(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of (key, token): the token-th output of SplitMix64 (Steele et al., OOPSLA 2014) started at
    the key, as a uniform in (0, 1) of 53 bits."""
    bits = _mix(keys + (tokens.astype(np.uint64) + np.uint64(2)) * STEP)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
