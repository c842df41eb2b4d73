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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NEAR_NATS = 8.0
"""Tokens at least e⁻⁸ times as likely as the likeliest get their own noise: some hundreds of a vocabulary, while the
pseudo-token, whose inside costs a pass over the vocabulary, wins in about one draw of a hundred."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_INSIDE = np.uint64(1) << np.uint64(63)
"""Separates the draw inside the pseudo-token from the draw that the pseudo-token won."""


@dataclass(frozen=True)
class Draw:
    """What a row samples with. ``position`` counts from the request's first answer token."""

    seed: int
    position: int
    temperature: float


@dataclass(frozen=True)
class Sampled:
    """tokens [rows] and natural log-probabilities [rows] float32; NaN where a row's logits are no distribution."""

    tokens: list[int]
    logprobs: list[float]


def sample(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    """One token for each draw from ``logits`` [rows, vocab]; rows beyond the draws are padding."""
    warmth = torch.tensor([d.temperature or 1.0 for d in draws] + [1.0] * (len(logits) - len(draws)))
    scaled = logits.float().div_(warmth.to(logits.device).unsqueeze(1))
    top = scaled.amax(-1, keepdim=True)
    distance = scaled.sub_(top)
    mass = distance.exp()
    total = mass.sum(-1)
    near = (distance >= -NEAR_NATS).nonzero()
    near_distance = distance[near[:, 0], near[:, 1]]
    mass[near[:, 0], near[:, 1]] = 0.0
    rest = mass.sum(-1)
    rows, tokens = near.cpu().numpy().T
    values = near_distance.double().cpu().numpy()
    masses, rests = total.double().cpu().numpy(), rest.double().cpu().numpy()
    chosen: list[int] = []
    bounds = np.searchsorted(rows, np.arange(len(draws) + 1))
    keys = _row_keys(draws)
    noise = _gumbel(keys[np.minimum(rows, len(draws) - 1)], tokens)
    for i, draw in enumerate(draws):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:  # not a number: no token is near the maximum
            chosen.append(0)
            continue
        candidates = values[begin:end] + (noise[begin:end] if draw.temperature else 0.0)
        best = int(candidates.argmax())
        token = int(tokens[begin + best])
        if draw.temperature and rests[i] > 0:
            pseudo = np.log(rests[i]) + _gumbel(keys[i : i + 1], np.array([-1]))[0]
            if pseudo > candidates[best]:
                token = _inside(distance[i], keys[i])
        chosen.append(token)
    picked = distance[torch.arange(len(draws)), torch.tensor(chosen)].double().cpu().numpy()
    return Sampled(chosen, (picked - np.log(masses[: len(draws)])).tolist())


def _inside(distance: Tensor, key: np.uint64) -> int:
    values = distance.double().cpu().numpy()
    far = np.nonzero(values < -NEAR_NATS)[0]
    return int(far[(values[far] + _gumbel(np.array([key ^ _INSIDE]), far)).argmax()])


def _row_keys(draws: Sequence[Draw]) -> np.ndarray:
    seeds = np.array([d.seed & 0xFFFFFFFFFFFFFFFF for d in draws], dtype=np.uint64)
    positions = np.array([d.position for d in draws], dtype=np.uint64)
    return _mix(_mix(seeds + _STEP) + positions * _STEP)


def _gumbel(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise of (key, token): the token-th output of SplitMix64 (Steele et al., OOPSLA 2014) started at
    the key, as a uniform in (0, 1) of 53 bits."""
    bits = _mix(keys + (tokens.astype(np.uint64) + np.uint64(2)) * _STEP)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
