"""Runners: one slice of an engine's batch through the decoder. The device decides how; the results are the same.

``KernelRunner`` is a CPU's; ``DenseRunner`` computes the same by PyTorch's operations, where the kernels cannot run.
Both multiply in the shapes that make a token's result independent of the batch (``batch_invariance``).
``cuda.CudaGraphRunner`` is a GPU's.

``WeightSets`` chooses the weights that a runner computes with: the base model's or a resident full-parameter version's.
Promise: a slice computes rows of one set. Rows of another set wait for at most ``WEIGHTS_SECONDS`` at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from rookery import protocol
from rookery.worker import device
from rookery.worker.engine.kv_cache import KVCache
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.attention import SegmentAttention
from rookery.worker.engine.native.cuda.graph_runner import CudaGraphRunner
from rookery.worker.engine.runner import BaseRunner, Runner, adapter_groups
from rookery.worker.engine.sampler import SampledTokens, SamplingKey
from rookery.worker.engine.sequences import SequenceChunk, TokenStream
from rookery.worker.model.adapter import ResidentModel, read_adapter
from rookery.worker.model.convert import read_full_version
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager


class DenseRunner(BaseRunner):
    def __init__(self, decoder: Decoder, loras: LoraManager, kv_budget_bytes: int) -> None:
        self._cache = KVCache(decoder.config, decoder.dtype, decoder.device, kv_budget_bytes)
        super().__init__(decoder, loras, self._cache)

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        attend = SegmentAttention(self._decoder.config, self._cache, TokenStream(streams))
        lora = self._loras.batch_product(*zip(*_doubled_groups(streams), strict=True))
        return self._decoder.forward(attend.tokens, attend.positions, attend, lora), attend.last


class KernelRunner(DenseRunner):
    """A CPU's with compiled kernels (``kernels.load`` comes first)."""

    def prefill(self, streams: Sequence[SequenceChunk]) -> tuple[Tensor, Tensor]:
        from rookery.worker.engine.native.kernels.attention import KernelAttention
        from rookery.worker.engine.native.kernels.layer_pass import forward
        from rookery.worker.engine.native.kernels.lora import KernelAdapter

        attend = KernelAttention(self._decoder, self._cache, TokenStream(streams))
        pack = partial(KernelAdapter.pack, layers=len(self._decoder.layers))
        groups = [(self._loras.packed(key, pack) if key else None, count) for key, count in _doubled_groups(streams)]
        return forward(self._decoder, attend.tokens, groups, attend), attend.last

    def sample(self, logits: Tensor, keys: Sequence[SamplingKey]) -> SampledTokens:
        from rookery.worker.engine.native.kernels import sampler

        return sampler.sample(logits, keys)


def _doubled_groups(streams: Sequence[SequenceChunk]) -> list[tuple[str, int]]:
    """The groups of the streams by adapter, with a lone token doubled (``batch_invariance``)."""
    groups = adapter_groups(streams)
    return groups if sum(count for _, count in groups) > 1 else [(groups[0][0], 2)]


def best_runner(
    decoder: ResidentModel,
    loras: LoraManager,
    kv_budget_bytes: int,
    *,
    compiled: bool = True,
    cache: Path | None = None,
) -> Runner:
    """The runner of the decoder's device. The pool needs the fused kernels: without them, every row's keys are gathered
    at the length of the longest. On a CPU, ``compiled`` allows those of ``kernels``, whose code is cached
    under ``cache``."""
    assert isinstance(decoder, Decoder), "other models need another runner"
    if device.fuses(decoder.device, decoder.dtype):
        return CudaGraphRunner(decoder, loras, kv_budget_bytes)
    runner = KernelRunner if compiled and kernels.usable(decoder, cache) else DenseRunner
    return runner(decoder, loras, kv_budget_bytes)


WEIGHTS_SECONDS = 0.5
"""Time after which another set that has rows is used. The exchange costs nothing on a CPU, and on a GPU the capture of
the decode steps' graphs."""


class WeightSets:
    """Chooses the set that the runner computes with. A set is named by the hash of its version, the base model's by an
    empty string."""

    def __init__(
        self, base: ResidentModel, loras: LoraManager, runner: Runner, turn_seconds: float = WEIGHTS_SECONDS
    ) -> None:
        """Rows of another set wait for at most ``turn_seconds``."""
        self._turn_seconds = turn_seconds
        self.base, self.loras, self.runner = base, loras, runner
        self._current = ""
        self._since = 0.0
        self.decoder: ResidentModel = base
        """The decoder with the weights in use."""

    def add(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """Attach the adapter or the full-parameter version ``ref``; see ``Engine.add_adapter``."""
        if self.loras.keep(ref.hash):
            return
        if ref.rank:
            self.loras.make_room(ref.rank)  # before reading: a caller without room tries again
            self.loras.add(ref.hash, read_adapter(folder, self.base.projections))
            return
        self.loras.add_full(ref.hash, self.base.bytes, lambda: self._read(folder))

    def _read(self, folder: Path) -> Decoder:
        assert isinstance(self.base, Decoder)
        return read_full_version(folder, self.base)

    def of(self, key: str) -> str:
        """The set of an adapter's rows."""
        return key if self.loras.decoder(key) is not None else ""

    def serves(self, key: str) -> bool:
        """Whether the weights in use are those of the adapter ``key``."""
        return self.of(key) == self._current

    def choose(self, keys: Iterable[str], *, turn: bool = False) -> None:
        """Before a slice: ``keys`` are the adapters of the running rows, in order of admission. ``turn``: another set
        comes now, because no row of this one computes."""
        sets = list(dict.fromkeys(map(self.of, keys)))
        if not sets or sets == [self._current]:
            return
        if self._current in sets and not turn and time.monotonic() - self._since < self._turn_seconds:
            return
        following = sets.index(self._current) + 1 if self._current in sets else 0
        self._use(sets[following % len(sets)])

    def clear_dropped(self) -> None:
        """Use no weights that have left memory; clears the list of the adapters that have."""
        if self._current in self.loras.dropped:
            self._use("")
        self.loras.dropped.clear()

    def _use(self, name: str) -> None:
        self._current, self._since = name, time.monotonic()
        self.decoder = self.loras.decoder(name) or self.base
        self.runner.use(self.decoder)
