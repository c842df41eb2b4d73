"""``sampler.sample`` on the device: only one token, log-probability and flag per row return to the host.

Promise: the same rule, the same noise and the same token for the same logits as on the host. The noise's integers are
equal bit for bit; logarithms may differ in their last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.sampler import NEAR_NATS, REST_KEY, STEP, SampledTokens, SamplingKey, row_keys

_STEP = int(STEP.astype(np.int64))
_REST_KEY = int(REST_KEY.astype(np.int64))
_MIX = (int(np.uint64(0xBF58476D1CE4E5B9).astype(np.int64)), int(np.uint64(0x94D049BB133111EB).astype(np.int64)))


def sample_on_device(logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
    """One token for each key from ``logits`` [rows, vocab]; rows beyond the keys are padding."""
    count, device = len(keys), logits.device
    host = np.stack(
        [row_keys(keys).view(np.int64), np.array([key.temperature for key in keys], dtype=np.float64).view(np.int64)]
    )
    sent = torch.from_numpy(host).to(device)
    noise_keys, temperature = sent[0], sent[1].view(torch.float64)
    random = temperature > 0
    divisor = torch.where(random, temperature, 1.0).float()
    p = torch.softmax(logits[:count] / divisor[:, None], -1)  # float32
    threshold = p.amax(-1, keepdim=True) * math.exp(-NEAR_NATS)
    rows, tokens = (p >= threshold).nonzero().T
    likely = p[rows, tokens].double().log()
    p[rows, tokens] = 0.0
    scores = likely + torch.where(random[rows], _gumbel(noise_keys[rows], tokens), 0.0)
    best, winner = _best(scores, rows, count)
    # where the logits are NaN no token is near the maximum: token 0, NaN
    chosen = torch.cat((tokens, tokens.new_zeros(1)))[winner]
    logprob = torch.cat((likely, likely.new_full((1,), torch.nan)))[winner]
    pseudo = p.sum(-1).double().log() + _gumbel(noise_keys, torch.full_like(noise_keys, -1))
    from_rest = random & (pseudo > best) & ~logprob.isnan()
    answer = torch.stack((chosen.double(), logprob, from_rest.double())).cpu()  # tokens are exact in float64
    sampled = SampledTokens([int(x) for x in answer[0].tolist()], answer[1].tolist())
    rest_rows = answer[2].nonzero()[:, 0].tolist()
    if rest_rows:
        index = torch.tensor(rest_rows, device=device)
        rest = p[index].double().log()
        every = torch.arange(rest.shape[1], device=device).expand_as(rest)
        token = (rest + _gumbel((noise_keys[index] ^ _REST_KEY)[:, None], every)).argmax(-1)
        back = torch.stack((token.double(), rest.gather(1, token[:, None])[:, 0])).cpu().tolist()
        for row, at, value in zip(rest_rows, *back, strict=True):
            sampled.tokens[row], sampled.logprobs[row] = int(at), value
    return sampled


def _best(scores: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Per row its largest score [count] and that one's index in ``scores`` [n]; −inf and n for a row without scores."""
    best = scores.new_full((count,), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    at = torch.where(scores == best[rows], torch.arange(len(rows), device=rows.device), len(rows))
    return best, torch.full_like(best, len(rows), dtype=torch.int64).scatter_reduce_(0, rows, at, "amin")


def _gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """``sampler.gumbel`` in the wrapping arithmetic of int64."""
    bits = _mix(keys + (tokens + 2) * _STEP)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _MIX[0]
    x = (x ^ _shifted(x, 27)) * _MIX[1]
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by with zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)
