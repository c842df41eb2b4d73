"""``sampler.sample`` as one kernel: a row of logits is read twice, and no tensor of probabilities is made.

Promise: the same rule and the same noise as in ``engine.sampler``, whose constants it takes; the noise's
integers are equal bit for bit. Sums over the vocabulary are taken lane by lane from the first token to the last, then
over the lanes (``vec.sum_lanes``), in float32; a token's score is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.engine.native.kernels.runtime import Arguments, Kernel
from rookery.worker.engine.native.kernels.vec import (
    LANES,
    device_function,
    exp,
    fetch_increment,
    load,
    max_lanes,
    read_float,
    read_int,
    splat,
    store_float,
    sum_lanes,
    where_less,
    write_float,
    write_int,
)
from rookery.worker.engine.sampler import (
    MIX,
    NEAR_NATS,
    REST_KEY,
    STEP,
    SampledTokens,
    SamplingKey,
    row_keys,
)

_NEAR = np.float32(math.exp(-NEAR_NATS))
_FIRST_MIX, _SECOND_MIX = MIX


@device_function
def _mixed(x: np.uint64) -> np.uint64:
    """``sampler._mix`` of one number."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST_MIX
    x = (x ^ (x >> np.uint64(27))) * _SECOND_MIX
    return x ^ (x >> np.uint64(31))


@device_function
def _uniform(key: np.uint64, token: int) -> float:
    """The number in (0, 1) that ``sampler._gumbel`` makes noise of."""
    bits = _mixed(key + (np.uint64(token) + np.uint64(2)) * STEP)
    return (np.float64(bits >> np.uint64(11)) + 0.5) * 2.0**-53


@device_function
def _exponentials(logits: int, at: int, vocabulary: int, half: int, temperature: float, out: int) -> float:
    """Writes exp(logit / temperature - their maximum) of a row to ``out`` [vocabulary] float32; returns the sum."""
    divisor = splat(temperature)
    top = splat(-np.inf)
    for i in range(0, vocabulary, LANES):
        x = load(logits, at + i, half) / divisor
        top = where_less(top, x, x, top)
    highest = splat(max_lanes(top))
    total = splat(0.0)
    for i in range(0, vocabulary, LANES):
        p = exp(load(logits, at + i, half) / divisor - highest)
        store_float(out, i, p)
        total = total + p
    return sum_lanes(total)


@device_function
def _draw(p: int, vocabulary: int, key: np.uint64, noisy: int, near: int) -> tuple[int, float, float]:
    """The winner among the tokens whose p is at least ``_NEAR`` (or, without ``near``, below it), its -log(u) / p, and
    the sum of p of all tokens below it. The token of the largest log(p) - log(-log(u)) has the smallest -log(u) / p;
    most are seen to be larger without the logarithm, since -log(u) >= 1 - u."""
    token, least = 0, np.inf
    rest = splat(0.0)
    for i in range(0, vocabulary, LANES):
        block = load(p, i, 0)
        rest = rest + where_less(block, splat(_NEAR), block, splat(0.0))
        if near and max_lanes(block) < _NEAR:
            continue
        for lane in range(LANES):
            x = np.float64(read_float(p, i + lane))
            if x > 0 and (x >= _NEAR) == (near != 0):
                if noisy:
                    u = _uniform(key, i + lane)
                    if (1.0 - u) / x < least:
                        quotient = -math.log(u) / x
                        if quotient < least:
                            token, least = i + lane, quotient
                elif 1.0 / x < least:
                    token, least = i + lane, 1.0 / x
    return token, least, np.float64(sum_lanes(rest))


def _sample(args: int) -> None:
    rows, vocabulary, half = read_int(args, 2), read_int(args, 3), read_int(args, 4)
    logits, temperatures, keys = read_int(args, 5), read_int(args, 6), read_int(args, 7)
    p = read_int(args, 8) + 4 * vocabulary * fetch_increment(args, 1)
    tokens, logprobs = read_int(args, 9), read_int(args, 10)
    while True:
        row = fetch_increment(args, 0)
        if row >= rows:
            break
        temperature, key = read_float(temperatures, row), np.uint64(read_int(keys, row))
        noisy = 1 if temperature > 0 else 0
        divisor = temperature if noisy else np.float32(1.0)
        total = np.float64(_exponentials(logits, row * vocabulary, vocabulary, half, divisor, p))
        token, least, rest = _draw(p, vocabulary, key, noisy, 1)
        if noisy and rest > 0 and -math.log(_uniform(key, -1)) / rest < least:
            token = _draw(p, vocabulary, key ^ REST_KEY, 1, 0)[0]
        logprob = math.log(np.float64(read_float(p, token)) / total) if total > 0 else np.nan
        write_int(tokens, row, token)
        write_float(logprobs, row, np.float32(logprob))


KERNEL = Kernel(_sample)


def sample(logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
    """``logits`` [at least len(keys), vocab] are bfloat16 or float32."""
    count = len(keys)
    rows = F.pad(logits, (0, -logits.shape[1] % LANES), value=-torch.inf).contiguous()
    vocabulary = rows.shape[1]
    tokens, logprobs = torch.empty(count, dtype=torch.int64), torch.empty(count)
    temperatures = torch.tensor([key.temperature for key in keys], dtype=torch.float32)
    noise_keys = torch.from_numpy(row_keys(keys).view(np.int64))
    half = rows.dtype == torch.bfloat16
    arguments = Arguments().number(count).number(vocabulary).number(half)
    arguments.tensor(rows[:count], torch.bfloat16 if half else torch.float32, count, vocabulary)
    arguments.tensor(temperatures, torch.float32, count).tensor(noise_keys, torch.int64, count)
    arguments.tensor(torch.empty(arguments.threads, vocabulary), torch.float32, arguments.threads, vocabulary)
    KERNEL(arguments.tensor(tokens, torch.int64, count).tensor(logprobs, torch.float32, count))
    return SampledTokens(tokens.tolist(), logprobs.tolist())
