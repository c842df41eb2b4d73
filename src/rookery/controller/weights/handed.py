"""Versions that a trainer has written and that are not committed: the workers of its machine that have them already.

The trainer's worker announces the files before it uploads them; workers that share its cache of artifacts take them
over and hash them meanwhile. When the version is committed they have it, and pull nothing. Otherwise it is withdrawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rookery import protocol
from rookery.controller.fleet.worker import CONNECTED, Worker


@dataclass(eq=False)
class HandedVersion:
    digest: str
    workers: dict[Worker, bool] = field(default_factory=dict)
    """The workers that were informed of it, and whether they have it."""


class HandedVersions:
    def __init__(self) -> None:
        self._versions: dict[str, HandedVersion] = {}
        """By policy: one at a time."""
        self._policies: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """By digest: the policies that have it here, more than one where their weights are equal."""

    def begin(self, trainer: Worker, ref: protocol.AdapterRef, folder: str, engines: Iterable[Worker]) -> None:
        """``trainer`` has written ``ref`` to the private ``folder`` of its cache: those of ``engines`` that share it
        take it over. What an earlier operation of the policy wrote, and no commit named, is withdrawn."""
        self._end(ref.policy)
        version = self._versions[ref.policy] = HandedVersion(ref.hash, {trainer: True})
        self._policies[ref.hash][ref.policy] = None
        for worker in engines:
            if worker is not trainer and _share(worker, trainer) and ref.hash not in worker.cached:
                version.workers[worker] = False
                worker.post(protocol.HandOver(ref=ref, folder=folder))

    def received(self, worker: Worker, digest: str) -> None:
        """``worker`` has it, and has checked its hash."""
        versions = [self._versions[policy] for policy in self._policies.get(digest, ())]
        if handed := [version for version in versions if worker in version.workers]:
            for version in handed:
                version.workers[worker] = True
            return
        committed = digest in worker.cached or digest in worker.orders or digest in worker.receiving
        if not committed:  # it ended meanwhile
            worker.post(protocol.Withdraw(hashes=[digest]))

    def commit(self, ref: protocol.AdapterRef) -> list[Worker]:
        """``ref`` is committed: the workers that have it, which make it an artifact of their cache."""
        version = self._versions.get(ref.policy)
        if version is None or version.digest != ref.hash:
            return []
        self._remove(ref.policy)
        return [worker for worker, has in version.workers.items() if has and worker.state in CONNECTED]

    def withdraw(self, digest: str) -> None:
        """No commit named it."""
        for policy in sorted(self._policies.get(digest, ())):
            self._end(policy)

    def lost(self, worker: Worker) -> None:
        """Its connection has ended, and with it all that it was handed."""
        for version in self._versions.values():
            version.workers.pop(worker, None)

    def _remove(self, policy: str) -> HandedVersion | None:
        version = self._versions.pop(policy, None)
        if version is not None:
            self._policies[version.digest].pop(policy, None)
            if not self._policies[version.digest]:
                del self._policies[version.digest]
        return version

    def _end(self, policy: str) -> None:
        version = self._remove(policy)
        if version is None:
            return
        equal = [self._versions[other] for other in self._policies.get(version.digest, ())]
        for worker in version.workers:
            if worker.state in CONNECTED and not any(worker in other.workers for other in equal):
                worker.post(protocol.Withdraw(hashes=[version.digest]))


def _share(one: Worker, other: Worker) -> bool:
    """Whether two workers run on one host, with one cache, and may read what the other has."""
    here, there = one.hello, other.hello
    return bool(here.cache) and (here.cache, here.host, one.reads) == (there.cache, there.host, other.reads)
