"""Kernels of a backward pass between its products: norms, SwiGLU, the rotation of heads, the softmax of the vocabulary.

Promise: the gradients that ``model.layers`` and ``trainer.loss_head`` compute by PyTorch's operations, in float32 with
one rounding at the end, and the same bits for every number of threads: a row is computed by one of them, and its sums
are taken lane by lane along it, then over the lanes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.native.kernels.runtime import Arguments, Kernel
from rookery.worker.engine.native.kernels.vec import (
    LANES,
    device_function,
    exp,
    fetch_increment,
    load,
    load_float,
    max_lanes,
    read_float,
    read_int,
    splat,
    store,
    store_float,
    sum_lanes,
    where_less,
    write_float,
)


def _norm(args: int) -> None:
    rows, width, half = read_int(args, 2), read_int(args, 3), read_int(args, 4)
    x, weight, eps, g = read_int(args, 5), read_int(args, 6), read_float(read_int(args, 7), 0), read_int(args, 8)
    stream, out = read_int(args, 9), read_int(args, 10)
    while True:
        row = fetch_increment(args, 0)
        if row >= rows:
            break
        at, squares, along = row * width, splat(0.0), splat(0.0)
        for i in range(0, width, LANES):
            value = load(x, at + i, half)
            squares = squares + value * value
            along = along + load(g, at + i, half) * load(weight, i, half) * value
        inverse = np.float32(1.0) / math.sqrt(sum_lanes(squares) / np.float32(width) + eps)
        slope = splat(sum_lanes(along) * inverse * inverse * inverse / np.float32(width))
        factor = splat(inverse)
        for i in range(0, width, LANES):
            value = load(g, at + i, half) * load(weight, i, half) * factor - load(x, at + i, half) * slope
            value = load_float(stream, at + i) + value
            store_float(stream, at + i, value)
            store(out, at + i, value, half)


NORM = Kernel(_norm)


def add_norm_gradient(stream: Tensor, g: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds ``layers.rms_norm_backward(g, x, weight, eps)`` to ``stream`` [tokens, hidden] float32 in place → the sum in
    the dtype of g, x and weight."""
    out = torch.empty_like(x)
    rows, width = x.shape
    arguments = _arguments(x).tensor(x, x.dtype, rows, width).tensor(weight, x.dtype, width)
    arguments.tensor(torch.tensor([eps]), torch.float32, 1).tensor(g, x.dtype, rows, width)
    NORM(arguments.tensor(stream, torch.float32, rows, width).tensor(out, x.dtype, rows, width))
    return out


def _swiglu(args: int) -> None:
    rows, width, half = read_int(args, 2), read_int(args, 3), read_int(args, 4)
    g, y, out = read_int(args, 5), read_int(args, 6), read_int(args, 7)
    one = splat(1.0)
    while True:
        row = fetch_increment(args, 0)
        if row >= rows:
            break
        for i in range(0, width, LANES):
            at = 2 * row * width + i
            d, gate, up = load(g, row * width + i, half), load(y, at, half), load(y, at + width, half)
            share = one / (one + exp(splat(0.0) - gate))
            store(out, at, d * up * share * (one + gate * (one - share)), half)
            store(out, at + width, d * gate * share, half)


SWIGLU = Kernel(_swiglu)


def swiglu_gradient(g: Tensor, y: Tensor) -> Tensor:
    """``layers.swiglu_backward(g, y)`` for g [tokens, inner] and y [tokens, 2 · inner] of one dtype."""
    out = torch.empty_like(y)
    rows, width = g.shape
    arguments = _arguments(g).tensor(g, g.dtype, rows, width).tensor(y, g.dtype, rows, 2 * width)
    SWIGLU(arguments.tensor(out, g.dtype, rows, 2 * width))
    return out


@device_function
def _turned_back(g: int, at: int, token: int, size: int, cos: int, sin: int, half: int, room: int, to: int) -> None:
    """One head of ``g``, its rotation undone, to ``room`` [2 · head_dim] and on to element ``to`` [head_dim]."""
    for i in range(0, size, LANES):
        x = load(g, at + i, half) * load(sin, token * size + i, half)
        store_float(room, i, x)
        store_float(room, size + i, x)  # so that the other half of each number lies in one piece
    for i in range(0, size, LANES):
        straight = load(g, at + i, half) * load(cos, token * size + i, half)
        store(to, i, straight + load_float(room, size // 2 + i), half)


def _heads(args: int) -> None:
    tokens, size, half = read_int(args, 2), read_int(args, 3), read_int(args, 4)
    heads, kv_heads, rotates = read_int(args, 5), read_int(args, 6), read_int(args, 7)
    cos, sin, out, bytes_each = read_int(args, 8), read_int(args, 9), read_int(args, 10), 2 if half else 4
    room = read_int(args, 11) + 8 * size * fetch_increment(args, 1)
    while True:
        token = fetch_increment(args, 0)
        if token >= tokens:
            break
        for head in range(heads + 2 * kv_heads):
            to = out + bytes_each * (token * (heads + 2 * kv_heads) + head) * size
            if head < heads:
                g, at = read_int(args, 12), (token * heads + head) * size
            elif head < heads + kv_heads:
                g, at = read_int(args, 13), (token * kv_heads + head - heads) * size
            else:
                g, at = read_int(args, 14), (token * kv_heads + head - heads - kv_heads) * size
            if rotates and head < heads + kv_heads:
                _turned_back(g, at, token, size, cos, sin, half, room, to)
            else:
                for i in range(0, size, LANES):
                    store(to, i, load(g, at + i, half), half)


HEADS = Kernel(_heads)


def heads_gradient(q: Tensor, k: Tensor, v: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """From the gradients by the rotated queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim], and by
    the values, to that by the projection [tokens, (heads + 2 · kv_heads) · head_dim]; ``rotation`` as
    ``Decoder.rotation`` gives it, None of a layer that does not rotate."""
    tokens, heads, size = q.shape
    kv_heads, dtype = k.shape[1], q.dtype
    out = torch.empty(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    arguments = Arguments().number(tokens).number(size).number(dtype == torch.bfloat16).number(heads).number(kv_heads)
    arguments.number(rotation is not None)
    for part in rotation or (torch.empty(tokens, 1, size, dtype=dtype),) * 2:
        arguments.tensor(part, dtype, tokens, 1, size)
    arguments.tensor(out, dtype, tokens, out.shape[1])
    arguments.tensor(torch.empty(arguments.threads, 2 * size), torch.float32, arguments.threads, 2 * size)
    arguments.tensor(q, dtype, tokens, heads, size).tensor(k, dtype, tokens, kv_heads, size)
    HEADS(arguments.tensor(v, dtype, tokens, kv_heads, size))
    return out


@device_function
def _scaled(logits: int, at: int, half: int, temperature: float) -> Any:
    """16 logits, divided by the temperature."""
    return load(logits, at, half) if temperature == 1.0 else load(logits, at, half) / splat(temperature)


def _softmax(args: int) -> None:
    rows, vocabulary, half, derivatives = read_int(args, 2), read_int(args, 3), read_int(args, 4), read_int(args, 5)
    logits, temperatures, targets, logp = read_int(args, 6), read_int(args, 7), read_int(args, 8), read_int(args, 9)
    room = read_int(args, 10) + 4 * (vocabulary + LANES) * fetch_increment(args, 1)
    while True:
        row = fetch_increment(args, 0)
        if row >= rows:
            break
        at, temperature, target = row * vocabulary, read_float(temperatures, row), read_int(targets, row)
        top = splat(-np.inf)
        for i in range(0, vocabulary, LANES):
            x = _scaled(logits, at + i, half, temperature)
            top = where_less(top, x, x, top)
        highest, total = max_lanes(top), splat(0.0)
        for i in range(0, vocabulary, LANES):
            p = exp(_scaled(logits, at + i, half, temperature) - splat(highest))
            store_float(room, i, p)
            total = total + p
        summed = sum_lanes(total)
        store_float(room, vocabulary, _scaled(logits, at + target // LANES * LANES, half, temperature))
        chosen = np.float64(read_float(room, vocabulary + target % LANES)) - np.float64(highest)
        write_float(logp, row, np.float32(chosen - math.log(np.float64(summed))))
        if derivatives:
            write_float(room, target, read_float(room, target) - summed)
            factor = splat(np.float32(1.0) / summed)
            for i in range(0, vocabulary, LANES):
                store(logits, at + i, load_float(room, i) * factor, half)


SOFTMAX = Kernel(_softmax)


def normalise(logits: Tensor, targets: Tensor, temperatures: Tensor | None, logp: Tensor, *, derivatives: bool) -> None:
    """``loss_head.Normalise`` of logits [rows, vocabulary], whose width is a multiple of 16. Raises ``ValueError`` for
    a target outside the vocabulary."""
    rows, vocabulary = logits.shape
    if rows and (targets.min() < 0 or targets.max() >= vocabulary):
        raise ValueError(f"a target is not within the vocabulary of {vocabulary}")
    arguments = _arguments(logits).number(derivatives).tensor(logits, logits.dtype, rows, vocabulary)
    arguments.tensor(torch.ones(rows) if temperatures is None else temperatures, torch.float32, rows)
    arguments.tensor(targets, torch.int64, rows).tensor(logp, torch.float32, rows)
    room = arguments.threads, vocabulary + LANES
    SOFTMAX(arguments.tensor(torch.empty(*room), torch.float32, *room))


KERNELS = (NORM, SWIGLU, HEADS, SOFTMAX)


def _arguments(x: Tensor) -> Arguments:
    """The first arguments of the kernels of rows: rows, width, and whether numbers are bfloat16."""
    return Arguments().number(x.shape[0]).number(x.shape[1]).number(x.dtype == torch.bfloat16)
