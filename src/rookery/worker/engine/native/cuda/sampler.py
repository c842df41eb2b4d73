"""``sampler.sample`` on the device: what comes back to the host is one token, log-probability and flag per row.

Promise: the same rule, the same noise, the same token for the same logits as on the host; the noise's integers are
equal bit for bit, logarithms may differ in their last digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.sampler import INSIDE, NEAR_NATS, STEP, Sampled, SamplingKey, row_keys

_STEP = int(STEP.astype(np.int64))
_INSIDE = int(INSIDE.astype(np.int64))
_MIX = (int(np.uint64(0xBF58476D1CE4E5B9).astype(np.int64)), int(np.uint64(0x94D049BB133111EB).astype(np.int64)))


def sample_on_device(logits: Tensor, draws: Sequence[SamplingKey]) -> Sampled:
    """One token for each draw from ``logits`` [rows, vocab]; rows beyond the draws are padding."""
    count, device = len(draws), logits.device
    host = np.stack(
        [row_keys(draws).view(np.int64), np.array([d.temperature for d in draws], dtype=np.float64).view(np.int64)]
    )
    sent = torch.from_numpy(host).to(device)
    keys, temperature = sent[0], sent[1].view(torch.float64)
    random = temperature > 0
    warmth = torch.where(random, temperature, 1.0).float()
    p = torch.softmax(logits[:count] / warmth[:, None], -1)  # float32
    bar = p.amax(-1, keepdim=True) * math.exp(-NEAR_NATS)
    rows, tokens = (p >= bar).nonzero().T
    likely = p[rows, tokens].double().log()
    p[rows, tokens] = 0.0
    scores = likely + torch.where(random[rows], _gumbel(keys[rows], tokens), 0.0)
    best, winner = _best(scores, rows, count)
    # where the logits are not numbers no token is near the maximum: token 0, NaN
    chosen = torch.cat((tokens, tokens.new_zeros(1)))[winner]
    logprob = torch.cat((likely, likely.new_full((1,), torch.nan)))[winner]
    pseudo = p.sum(-1).double().log() + _gumbel(keys, torch.full_like(keys, -1))
    inside = random & (pseudo > best) & ~logprob.isnan()
    answer = torch.stack((chosen.double(), logprob, inside.double())).cpu()  # tokens are exact in float64
    sampled = Sampled([int(x) for x in answer[0].tolist()], answer[1].tolist())
    again = answer[2].nonzero()[:, 0].tolist()
    if again:
        here = torch.tensor(again, device=device)
        rest = p[here].double().log()
        every = torch.arange(rest.shape[1], device=device).expand_as(rest)
        token = (rest + _gumbel((keys[here] ^ _INSIDE)[:, None], every)).argmax(-1)
        back = torch.stack((token.double(), rest.gather(1, token[:, None])[:, 0])).cpu().tolist()
        for row, at, value in zip(again, *back, strict=True):
            sampled.tokens[row], sampled.logprobs[row] = int(at), value
    return sampled


def _best(scores: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Per row its largest score [count] and where it is among ``scores`` [n]; −inf and n where it has none."""
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
    """To the right, zeros from the left."""
    return (x >> by) & ((1 << (64 - by)) - 1)
