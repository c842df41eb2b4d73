"""What workers are asked to have in their caches, what they said they have, and who is slow to get it.

* A newer version of a policy overtakes older ones that a worker was asked for and has not: they need not come any more.
* A worker that took much longer for a version than the first one did, or was overtaken by the next version, is *slow*:
  until it has a version it is given no request for it. Requests go to the others, whose pulls it does not hold up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rookery import wire
from rookery.controller.lending import Lending
from rookery.controller.ports import Clock
from rookery.controller.worker import Asked, Worker

SLOW_FACTOR = 3.0
"""A slow worker took this many times as long as the first one …"""

SLOW_SECONDS = 0.5
"""… and this much longer: what is quick anyhow needs no judging."""


class Holdings:
    """Changes workers' ``holds``, ``asked``, ``behind`` and ``slow``; their states are the fleet's."""

    def __init__(self, lending: Lending, clock: Clock) -> None:
        self._lending = lending
        self._clock = clock
        self._quickest: dict[str, float] = {}
        """By hash: seconds that the first worker took for what it was asked for."""

    def ask(self, worker: Worker, refs: Sequence[wire.AdapterRef]) -> None:
        """Have these in the cache."""
        now = self._clock.monotonic()
        for ref in refs:
            if self._overtake(worker, ref, worker.asked.keys() - worker.behind):
                worker.slow = True
        worker.asked.update((ref.hash, Asked(ref, now)) for ref in refs)
        worker.post(wire.Hold(refs=[self._lending.refer(worker, ref) for ref in refs]))

    def arrived(self, worker: Worker, hashes: Iterable[str]) -> None:
        """``worker`` said that it has these."""
        worker.holds.update(hashes)
        self._lending.holds(worker, hashes)
        for digest in hashes:
            asked = worker.asked.pop(digest, None)
            worker.behind.discard(digest)
            if asked is not None:
                self._judge(worker, digest, self._clock.monotonic() - asked.since)
                self._overtake(worker, asked.ref, set(worker.asked))

    def excuse(self, worker: Worker, digest: str) -> None:
        """It need not have this."""
        worker.asked.pop(digest, None)
        worker.behind.discard(digest)

    def forget(self, workers: Iterable[Worker], hashes: Sequence[str]) -> None:
        """No work will name these again."""
        self._lending.forget(hashes)
        for digest in hashes:
            self._quickest.pop(digest, None)
        for worker in workers:
            worker.post(wire.Forget(hashes=list(hashes)))
            worker.holds.difference_update(hashes)
            worker.named.difference_update(hashes)
            for digest in hashes:
                self.excuse(worker, digest)

    def _judge(self, worker: Worker, digest: str, seconds: float) -> None:
        quickest = self._quickest.setdefault(digest, seconds)
        worker.slow = seconds > SLOW_FACTOR * quickest + SLOW_SECONDS

    @staticmethod
    def _overtake(worker: Worker, by: wire.AdapterRef, asked: Iterable[str]) -> bool:
        """Of these that it was asked for, older versions of the policy than ``by`` need not come any more; whether
        there were any."""
        older = [
            digest
            for digest in asked
            if (ref := worker.asked[digest].ref).policy == by.policy and ref.version < by.version
        ]
        for digest in older:
            del worker.asked[digest]
            worker.behind.discard(digest)
        return bool(older)
