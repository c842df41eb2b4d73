"""A dict whose values are found by their groups, too: a look at one group costs nothing of the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, MutableMapping
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class IndexedDict(MutableMapping[K, V]):
    def __init__(self, **groups: Callable[[V], Hashable]) -> None:
        """``groups``: by name, the group of a value, which is the same for as long as the value is here."""
        self._items: dict[K, V] = {}
        self._groups = groups
        self._index: dict[str, dict[Any, dict[K, V]]] = {name: {} for name in groups}

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        self._items[key] = value
        for name, group_of in self._groups.items():
            self._index[name].setdefault(group_of(value), {})[key] = value

    def __delitem__(self, key: K) -> None:
        value = self._items.pop(key)
        for name, group_of in self._groups.items():
            index, group = self._index[name], group_of(value)
            del index[group][key]
            if not index[group]:
                del index[group]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def of(self, **group: Hashable) -> list[V]:
        """The values of one group, such as ``of(tenant="alice")``, the first to come first, as they are now."""
        [(name, value)] = group.items()
        return list(self._index[name].get(value, {}).values())

    def count(self, **group: Hashable) -> int:
        """The number of values of one group."""
        [(name, value)] = group.items()
        return len(self._index[name].get(value, ()))

    def has(self, **group: Hashable) -> bool:
        """Whether a group has values."""
        [(name, value)] = group.items()
        return value in self._index[name]

    def groups(self, name: str) -> Collection[Any]:
        """The groups of that name that have values, as they are now."""
        return list(self._index[name])
