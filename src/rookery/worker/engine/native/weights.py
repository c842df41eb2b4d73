"""Sets of weights of one base model: its own, and those of resident full-parameter versions.

Promise: a slice computes rows of one set. Rows of another set wait for at most ``WEIGHTS_SECONDS`` at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rookery import protocol
from rookery.worker.engine.native.runner import EngineModel, Runner
from rookery.worker.model.adapter import read_adapter
from rookery.worker.model.convert import read_full_version
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

WEIGHTS_SECONDS = 0.5
"""Time after which another set that has rows is used. The exchange costs nothing on a CPU, and on a GPU the capture of
the decode steps' graphs."""


class WeightSets:
    """Chooses the set that the runner computes with. A set is named by the hash of its version, the base model's by an
    empty string."""

    def __init__(self, base: EngineModel, bank: LoraManager, runner: Runner) -> None:
        self._base = base
        self._bank = bank
        self._runner = runner
        self._current = ""
        self._since = 0.0
        self.decoder: EngineModel = base
        """With the weights in use."""

    def add(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """Attach the adapter or the full-parameter version ``ref``; see ``Engine.add_adapter``."""
        if ref.rank:
            self._bank.make_room(ref.rank)  # before reading: a caller without room tries again
            self._bank.add(ref.hash, read_adapter(folder, self._base.projections))
            return
        self._bank.add_full(ref.hash, self._base.bytes, lambda: self._read(folder))

    def _read(self, folder: Path) -> Decoder:
        assert isinstance(self._base, Decoder)
        return read_full_version(folder, self._base)

    def of(self, key: str) -> str:
        """The set of an adapter's rows."""
        return key if self._bank.decoder(key) is not None else ""

    def serves(self, key: str) -> bool:
        """Whether the weights in use are those of the adapter ``key``."""
        return self.of(key) == self._current

    def choose(self, keys: Iterable[str]) -> None:
        """Before a slice: ``keys`` are the adapters of the running rows, in order of admission."""
        sets = list(dict.fromkeys(map(self.of, keys)))
        if not sets or sets == [self._current]:
            return
        if self._current in sets and time.monotonic() - self._since < WEIGHTS_SECONDS:
            return
        following = sets.index(self._current) + 1 if self._current in sets else 0
        self._use(sets[following % len(sets)])

    def clear_dropped(self) -> None:
        """Use no weights that have left memory; clears the list of the adapters that have."""
        if self._current in self._bank.dropped:
            self._use("")
        self._bank.dropped.clear()

    def _use(self, name: str) -> None:
        self._current, self._since = name, time.monotonic()
        self.decoder = self._bank.decoder(name) or self._base
        self._runner.use(self.decoder)
