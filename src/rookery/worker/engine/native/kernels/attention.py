"""Attention over cached segments, by two kernels: the first rotates and caches, the second attends.

Promise: the output of (token, head) is the same bits in any batch, at prefill, at decoding and in training, wherever
the shared prefix ends. Its order of accumulation, in float32, is that of its own keys' positions alone.

* A score is one chain of fused multiply-adds over the head's dimensions.
* The softmax takes two passes: the maximum, then the exponentials, whose sum is taken lane by lane over blocks of 16
  positions, then over the lanes.
* A value is one chain over the keys, divided by the sum of the exponentials at the end.

Keys lie as [16-key block, head_dim, 16], so that no score needs a sum over lanes; values as [key, head_dim]. Both fill
the part of a slot that belongs to a layer and head in ``KVCache``. Neighbouring tokens that attend to the same keys are
a block, and read them together. A tail or a prefix is a *segment*, number 1 or 0 of a token.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rookery.worker.engine.kv_cache import KVCache
from rookery.worker.engine.native.kernels.product import multiply
from rookery.worker.engine.native.kernels.runtime import FIRST, Arguments, Kernel, check_rows, checked_address
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
    rounded,
    splat,
    store,
    store_float,
    sum_lanes,
    where_less,
    write_float,
    write_half,
)
from rookery.worker.engine.sequences import TokenStream
from rookery.worker.model.decoder import Decoder

_BLOCK_ROWS = 24
"""Most query rows (tokens times query heads per key head) of a block: three times as many as a product holds in
registers, so that most reads of keys and values find them in the first cache."""

_BLOCKS_PER_THREAD = 4
"""So many blocks of each key head are made for every thread, if there are as many tokens, so that none waits long."""

(_TOKENS, _KV_HEADS, _GROUP, _SIZE, _LAYERS, _HALF, _SPANS, _BLOCKS, _NUM_BLOCKS, _KEYS, _VALUES, _QUERIES, _COS,
 _SIN, _CONSTANTS, _SCRATCH, _ROOM, _WIDTH, _ROWS, _LAYER, _ROTATES, _WINDOW, _QKV, _OUT, _Q_NORM,
 _K_NORM) = range(FIRST, FIRST + 26)  # fmt: skip
"""Both kernels read the same arguments. From ``_LAYER`` on, they are a layer's."""

_PREFIX_START, _PREFIX_CAPACITY, _TAIL_START, _TAIL_CAPACITY, _PREFIX_LENGTH, _INDEX = range(6)
"""Columns of ``_SPANS`` [tokens, 6]: the segments' slots, the prefix's tokens, and the token's index in the tail."""


@device_function
def _span(args: int, token: int, column: int) -> int:
    return read_int(read_int(args, _SPANS), token * 6 + column)


@device_function
def _address(args: int, base: int, token: int, segment: int, head: int, key: int) -> int:
    """Of a key (the first of its block) or value of the token's segment, for a key head."""
    heads, half = read_int(args, _KV_HEADS), read_int(args, _HALF)
    row = _span(args, token, 2 * segment) * read_int(args, _LAYERS) * heads
    row += (read_int(args, _LAYER) * heads + head) * _span(args, token, 2 * segment + 1) + key
    return read_int(args, base) + (2 if half else 4) * row * read_int(args, _SIZE)


@device_function
def _rotated(args: int, token: int, head: int, norm: int, out: int) -> None:
    """One head of ``_QKV``, normalised with the weight ``norm`` (0: not) and rotated, to ``out`` [head_dim] float32,
    which has room for twice as many."""
    size, half = read_int(args, _SIZE), read_int(args, _HALF)
    heads = read_int(args, _KV_HEADS) * (read_int(args, _GROUP) + 2)
    at = (token * heads + head) * size
    factor = splat(1.0)
    if norm:
        squares = splat(0.0)
        for i in range(0, size, LANES):
            x = load(read_int(args, _QKV), at + i, half)
            squares = squares + x * x
        mean = sum_lanes(squares) / np.float32(size)
        factor = splat(np.float32(1.0) / math.sqrt(mean + read_float(read_int(args, _CONSTANTS), 0)))
    for i in range(0, size, LANES):
        x = load(read_int(args, _QKV), at + i, half) * factor
        if norm:
            x = x * load(norm, i, half)
        store_float(out, i, x)
        store_float(out, size + i, x)  # so that what is rotated in lies in one piece
    if read_int(args, _ROTATES):
        for i in range(0, size, LANES):
            turned = load_float(out, size // 2 + i) * load(read_int(args, _SIN), token * size + i, half)
            straight = load_float(out, i) * load(read_int(args, _COS), token * size + i, half)
            store_float(out, i, straight + turned)


def _rotate(args: int) -> None:
    """Blocks are tokens. Queries are written scaled, as [kv_heads, tokens, group, head_dim] float32."""
    tokens, kv_heads, group = read_int(args, _TOKENS), read_int(args, _KV_HEADS), read_int(args, _GROUP)
    size, half, queries = read_int(args, _SIZE), read_int(args, _HALF), read_int(args, _QUERIES)
    out = read_int(args, _SCRATCH) + 4 * read_int(args, _ROOM) * fetch_increment(args, 1)
    scale = splat(read_float(read_int(args, _CONSTANTS), 1))
    while True:
        token = fetch_increment(args, 0)
        if token >= tokens:
            break
        for head in range(kv_heads * group):
            _rotated(args, token, head, read_int(args, _Q_NORM), out)
            to = ((head // group * tokens + token) * group + head % group) * size
            for i in range(0, size, LANES):
                store_float(queries, to + i, load_float(out, i) * scale)
        index = _span(args, token, _INDEX)
        for head in range(kv_heads):
            _rotated(args, token, kv_heads * group + head, read_int(args, _K_NORM), out)
            for i in range(0, size, LANES):
                store_float(out, i, rounded(load_float(out, i), half))
            key = _address(args, _KEYS, token, 1, head, index // LANES * LANES)
            for i in range(size):
                if half:
                    write_half(key, i * LANES + index % LANES, read_float(out, i))
                else:
                    write_float(key, i * LANES + index % LANES, read_float(out, i))
            at = ((token * (group + 2) + group + 1) * kv_heads + head) * size
            value = _address(args, _VALUES, token, 1, head, index)
            for i in range(0, size, LANES):
                store(value, i, load(read_int(args, _QKV), at + i, half), half)


@device_function
def _begin(args: int, token: int, segment: int) -> int:
    """The first key of a segment that the token attends to; ``_end`` if there is none."""
    length, window = _span(args, token, _PREFIX_LENGTH), read_int(args, _WINDOW)
    first = max(length + _span(args, token, _INDEX) + 1 - window, 0) if window else 0
    return max(first - length, 0) if segment else min(first, length)


@device_function
def _end(args: int, token: int, segment: int) -> int:
    """The end of these keys."""
    return _span(args, token, _INDEX) + 1 if segment else _span(args, token, _PREFIX_LENGTH)


@device_function
def _blocks_up(keys: int) -> int:
    """The next multiple of a block's keys."""
    return (keys + LANES - 1) // LANES * LANES


@device_function
def _score(args: int, first: int, count: int, segment: int, head: int, query: int, scores: int) -> None:
    """Scores of ``count`` tokens that attend to the same segment, whose keys all lie in its blocks from the first to
    the last that one of them attends to: ``scores`` [rows, width], of which each row starts at the segment's key 0. It
    writes up to the end of the last block, so the tail's scores come after the prefix's."""
    size, width = read_int(args, _SIZE), read_int(args, _WIDTH)
    begin, end = _begin(args, first, segment), _end(args, first, segment)
    for token in range(first + 1, first + count):
        begin, end = min(begin, _begin(args, token, segment)), max(end, _end(args, token, segment))
    if begin >= end:
        return
    begin = begin // LANES * LANES
    rows, out = count * read_int(args, _GROUP), scores + 4 * begin
    for row in range(rows):
        for i in range(0, end - begin, LANES):
            store_float(out, row * width + i, splat(0.0))
    keys = _address(args, _KEYS, first, segment, head, begin)
    vectors = _blocks_up(end - begin) // LANES
    multiply(query, size, rows, keys, LANES, LANES * size, size, out, width, vectors, read_int(args, _HALF))


@device_function
def _softmax(args: int, token: int, scores: int) -> float:
    """Replaces a row's scores, one for each position, by exp(score - maximum) and returns their sum."""
    end, window = _span(args, token, _PREFIX_LENGTH) + _span(args, token, _INDEX) + 1, read_int(args, _WINDOW)
    begin = max(end - window, 0) if window else 0
    first = begin // LANES * LANES
    for i in range(first, begin):
        write_float(scores, i, np.float32(-np.inf))
    for i in range(end, _blocks_up(end)):
        write_float(scores, i, np.float32(-np.inf))
    top, total = splat(-np.inf), splat(0.0)
    for i in range(first, end, LANES):
        x = load_float(scores, i)
        top = where_less(top, x, x, top)
    highest = splat(max_lanes(top))
    for i in range(first, end, LANES):
        x = exp(load_float(scores, i) - highest)
        store_float(scores, i, x)
        total = total + x
    return sum_lanes(total)


@device_function
def _add_values(args: int, begin: int, end: int, rows: int, values: int, weights: int, sums: int) -> None:
    """Adds to ``sums`` [rows, head_dim] the values from ``begin`` to before ``end``, by ``weights`` [rows, width]."""
    size, half = read_int(args, _SIZE), read_int(args, _HALF)
    if begin < end:
        values += (2 if half else 4) * begin * size
        width = read_int(args, _WIDTH)
        multiply(weights + 4 * begin, width, rows, values, size, LANES, end - begin, sums, size, size // LANES, half)


@device_function
def _weigh(args: int, first: int, count: int, segment: int, head: int, weights: int, sums: int) -> None:
    """``_add_values`` of tokens that attend to the same segment: each one's keys before those that all have, those,
    and each one's keys behind them."""
    group, values = read_int(args, _GROUP), _address(args, _VALUES, first, segment, head, 0)
    row, out = 4 * group * read_int(args, _WIDTH), 4 * group * read_int(args, _SIZE)
    begin, end = _begin(args, first, segment), _end(args, first, segment)
    for token in range(first + 1, first + count):
        begin, end = max(begin, _begin(args, token, segment)), min(end, _end(args, token, segment))
    end = max(begin, end)
    for i in range(count):
        stop = min(begin, _end(args, first + i, segment))
        _add_values(args, _begin(args, first + i, segment), stop, group, values, weights + i * row, sums + i * out)
    _add_values(args, begin, end, count * group, values, weights, sums)
    for i in range(count):
        stop = _end(args, first + i, segment)
        _add_values(args, end, stop, group, values, weights + i * row, sums + i * out)


def _attend(args: int) -> None:
    """Blocks are those of tokens ``_BLOCKS`` [blocks, 3] (first token, tokens, whether they have one tail), for each
    key head. ``_SCRATCH`` of a thread: scores [rows, width], sums [rows, head_dim]."""
    kv_heads, group, size = read_int(args, _KV_HEADS), read_int(args, _GROUP), read_int(args, _SIZE)
    width, out, half = read_int(args, _WIDTH), read_int(args, _OUT), read_int(args, _HALF)
    scores = read_int(args, _SCRATCH) + 4 * read_int(args, _ROOM) * fetch_increment(args, 1)
    sums = scores + 4 * read_int(args, _ROWS) * width
    while True:
        block = fetch_increment(args, 0)
        if block >= read_int(args, _NUM_BLOCKS) * kv_heads:
            break
        head, block = block % kv_heads, read_int(args, _BLOCKS) + 24 * (block // kv_heads)
        first, count, one_tail = read_int(block, 0), read_int(block, 1), read_int(block, 2)
        query = read_int(args, _QUERIES) + 4 * (head * read_int(args, _TOKENS) + first) * group * size
        tail = _span(args, first, _PREFIX_LENGTH)
        together = count if one_tail else 1
        _score(args, first, count, 0, head, query, scores)
        for i in range(0, count, together):
            to = scores + 4 * (i * group * width + tail)
            _score(args, first + i, together, 1, head, query + 4 * i * group * size, to)
        for i in range(0, count * group * size, LANES):
            store_float(sums, i, splat(0.0))
        # The sums of the exponentials wait where the queries were, which have been read.
        for row in range(count * group):
            write_float(query, row, _softmax(args, first + row // group, scores + 4 * row * width))
        _weigh(args, first, count, 0, head, scores, sums)
        for i in range(0, count, together):
            weights = scores + 4 * (i * group * width + tail)
            _weigh(args, first + i, together, 1, head, weights, sums + 4 * i * group * size)
        for row in range(count * group):
            total = splat(read_float(query, row))
            to = ((first + row // group) * kv_heads * group + head * group + row % group) * size
            for i in range(0, size, LANES):
                store(out, to + i, load_float(sums, row * size + i) / total, half)


ROTATE, ATTEND = Kernel(_rotate), Kernel(_attend)


class KernelAttention:
    """The attention of one slice: its ``tokens`` and ``positions`` [tokens]; ``last`` [chunks] are the chunks' last
    tokens. head_dim must be a multiple of 16. A cache of one layer serves all layers where nothing is read later."""

    def __init__(self, decoder: Decoder, cache: KVCache, stream: TokenStream) -> None:
        """Raises ``ValueError`` for slots that are not in the cache, or tokens that are not in their slots."""
        config, dtype, size = decoder.config, decoder.dtype, decoder.config.head_dim
        self._decoder, self._cache, self._stream = decoder, cache, stream
        self.tokens, self.positions, self.last = map(torch.from_numpy, (stream.tokens, stream.positions, stream.last))
        spans = _checked_spans(cache, stream)
        count, threads = len(spans), torch.get_num_threads()
        most = min(_BLOCK_ROWS // config.group, count * config.kv_heads // (_BLOCKS_PER_THREAD * threads))
        blocks = _token_blocks(spans, max(1, most))
        rows = int(blocks[:, 1].max()) * config.group
        ends = spans[:, (_PREFIX_LENGTH, _INDEX)] + [0, 1]
        width = int((-(-ends // LANES) * LANES).sum(1).max())
        room = max(2 * size, rows * (width + size))
        cos, sin = (x.reshape(count, size) for x in decoder.rotation(self.positions))
        arguments = self._arguments = Arguments()
        for number in (count, config.kv_heads, config.group, size, cache.layers, dtype == torch.bfloat16):
            arguments.number(number)
        arguments.tensor(torch.from_numpy(spans), torch.int64, count, 6)
        arguments.tensor(torch.from_numpy(blocks), torch.int64, len(blocks), 3).number(len(blocks))
        for x in (cache.k, cache.v):
            arguments.tensor(x, dtype, cache.tokens * cache.layers * config.kv_heads, size)
        arguments.tensor(torch.empty(count, config.heads, size), torch.float32, count, config.heads, size)
        arguments.tensor(cos, dtype, count, size).tensor(sin, dtype, count, size)
        arguments.tensor(torch.tensor([config.eps, size**-0.5]), torch.float32, 2)
        arguments.tensor(torch.empty(arguments.threads, room), torch.float32, arguments.threads, room)
        for number in (room, width, rows):
            arguments.number(number)
        self._count = count

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """A layer's projections qkv [tokens, (heads + 2 kv_heads) · head_dim], neither normalised nor rotated →
        [tokens, heads · head_dim]. Writes keys and values to the cache."""
        config, w, dtype = self._decoder.config, self._decoder.layers[layer], self._decoder.dtype
        norms = [checked_address(x, dtype, (config.head_dim,)) if x is not None else 0 for x in (w.q_norm, w.k_norm)]
        address = checked_address(qkv, dtype, (self._count, (config.heads + 2 * config.kv_heads) * config.head_dim))
        out = torch.empty(self._count, config.heads * config.head_dim, dtype=dtype)
        switches = layer % self._cache.layers, int(config.rope[layer]), config.windows[layer]
        self._arguments.replace(_LAYER, *switches, address, out.data_ptr(), *norms)
        ROTATE(self._arguments)
        ATTEND(self._arguments)
        return out


def _checked_spans(cache: KVCache, stream: TokenStream) -> np.ndarray:
    """``_SPANS`` of the tokens."""
    tails = [chunk.slot for chunk in stream.chunks]
    prefixes = [chunk.prefix_slot or chunk.slot for chunk in stream.chunks]
    lengths = [chunk.prefix_length for chunk in stream.chunks]
    ends = [chunk.start + len(chunk.tokens) for chunk in stream.chunks]
    for slots, used in ((tails, ends), (prefixes, lengths)):
        for slot, length in zip(slots, used, strict=True):
            check_rows(slot.start, slot.capacity, cache.tokens)
            check_rows(0, length, slot.capacity)
    by_chunk = [
        (prefix.start, prefix.capacity, tail.start, tail.capacity, length)
        for prefix, tail, length in zip(prefixes, tails, lengths, strict=True)
    ]
    spans = np.empty((len(stream.tokens), 6), dtype=np.int64)
    spans[:, :_INDEX] = np.array(by_chunk, dtype=np.int64)[stream.owner]
    spans[:, _INDEX] = stream.index
    return spans


def _token_blocks(spans: np.ndarray, most: int) -> np.ndarray:
    """``_BLOCKS``: tokens of one tail in a row, or of several tails with one prefix, at most ``most``."""
    prefix, tail, shared = (spans[:, column].tolist() for column in (_PREFIX_START, _TAIL_START, _PREFIX_LENGTH))
    blocks = [[0, 1, 1]]
    for token in range(1, len(spans)):
        first, count, one_tail = blocks[-1]
        same = tail[token] == tail[token - 1]
        siblings = shared[token] and shared[first] and prefix[token] == prefix[first]
        if count < most and one_tail and same:
            blocks[-1][1] += 1
        elif count < most and not same and siblings and (count == 1 or not one_tail):
            blocks[-1][1:] = [count + 1, 0]
        else:
            blocks.append([token, 1, 1])
    return np.array(blocks, dtype=np.int64)
