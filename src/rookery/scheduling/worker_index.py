"""The workers of one base model, sorted for placement and load balancing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from sortedcontainers import SortedList

from rookery.scheduling.balancing import WorkerLoad, by_executing, by_pending, order


class WorkerIndex:
    """The functions of :mod:`rookery.scheduling.balancing` decide on the workers that :meth:`first` and :meth:`fullest`
    return as they would on all of them. A change of one worker costs the logarithm of their number, a change that keeps
    its rank costs nothing.

    A worker has *tags*: a request asks for the first worker of each tag that suits it. A worker without tags
    gets no requests; requests may still be moved away from it."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerLoad] = {}
        self._tags_of: dict[str, frozenset[str]] = {}
        self._by_tag: dict[str, Any] = {}
        """By tag, the sorted keys (:func:`order`) of its workers."""
        self._pending: Any = SortedList()
        self._executing: Any = SortedList()

    def put(self, worker: WorkerLoad, tags: frozenset[str]) -> None:
        """Add the worker, or replace the one of its name."""
        name, key = worker.name, order(worker)
        old, old_tags = self._workers.get(name), self._tags_of.get(name, frozenset())
        old_key = order(old) if old is not None else None
        if old is None or key != old_key or tags != old_tags:
            kept = old_tags & tags if key == old_key else frozenset()
            self._untag(old_key, old_tags - kept)
            for tag in tags - kept:
                self._by_tag.setdefault(tag, SortedList()).add(key)
        for ranking, rank in ((self._pending, by_pending), (self._executing, by_executing)):
            if old is None or rank(old) != rank(worker):
                if old is not None:
                    ranking.remove(rank(old))
                ranking.add(rank(worker))
        self._workers[name], self._tags_of[name] = worker, tags

    def remove(self, name: str) -> None:
        """Raises KeyError for an unknown name."""
        worker = self._workers.pop(name)
        self._untag(order(worker), self._tags_of.pop(name))
        self._pending.remove(by_pending(worker))
        self._executing.remove(by_executing(worker))

    def _untag(self, key: tuple[int, bool, bool, int, str] | None, tags: Iterable[str]) -> None:
        for tag in tags:
            self._by_tag[tag].remove(key)
            if not self._by_tag[tag]:
                del self._by_tag[tag]

    def first(self, tags: Iterable[str], without: Collection[str] = ()) -> list[WorkerLoad]:
        """The worker of each of these tags that gets the next request; those of the names ``without`` get none."""
        ranked = (self._by_tag.get(tag, ()) for tag in tags)
        names = (next((key[-1] for key in keys if key[-1] not in without), None) for keys in ranked)
        return [self._workers[name] for name in names if name is not None]

    def fullest(self) -> list[WorkerLoad]:
        """The most-pending and the most-executing worker; empty without workers."""
        return [self._workers[ranking[0][-1]] for ranking in (self._pending, self._executing) if ranking]
