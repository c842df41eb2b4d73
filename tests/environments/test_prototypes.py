"""Which environments a host keeps built."""

from __future__ import annotations

import gc
from array import array
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from rookery.environments.base import Environment, Split
from rookery.environments.jsonl import IndexedRows
from rookery.environments.prototypes import Prototypes
from rookery.turns import TENANT, work_of


class Plain(Environment):
    def prompts(self, split: Split) -> list[Any]:
        return [1]

    def reset(self, prompt: Any, seed: int) -> Any:
        return []


async def test_environments_that_nothing_uses_are_dropped_with_their_rows() -> None:
    """One of a user is kept, which may take minutes to build, unless there are too many."""
    now, built, alive = 0.0, Counter[tuple[str, int]](), WeakSet[Environment]()

    async def build(name: str, options: dict[str, Any]) -> Environment:
        built[name, options["number"]] += 1
        alive.add(environment := Plain())
        return environment

    kept = Prototypes(build, lambda name: name == "builtin", most=8, unused_seconds=10.0, clock=lambda: now)

    async def use(name: str, *numbers: int) -> int:
        """How many there are then."""
        for number in numbers:
            await kept.get(name, {"number": number})
        gc.collect()
        return len(alive)

    assert await use("builtin", 0, 1, 2) == 3 and await use("users", 0, 1, 2) == 6
    now = 11.0
    assert await use("builtin", 2) == 4 and set(built.values()) == {1}
    assert await use("users", *range(3, 9)) == 8
    assert await use("users", 0, 8) == 8 and [built["users", number] for number in (0, 8)] == [2, 1]
    await kept.close()


async def test_an_environment_whose_build_failed_is_built_again() -> None:
    failures = [ValueError("no rows")]

    async def build(name: str, options: dict[str, Any]) -> Environment:
        if failures:
            raise failures.pop()
        return Plain()

    kept = Prototypes(build, lambda name: True)
    with pytest.raises(ValueError, match="no rows"):
        await kept.get("env", {})
    assert isinstance((await kept.get("env", {})).environment, Plain)


async def test_tenants_share_no_environment_and_displace_none() -> None:
    """Two that give the same options: one's replies that compute for long held all processes of both."""
    built = Counter[str]()

    async def build(name: str, options: dict[str, Any]) -> Environment:
        built[TENANT.get()] += 1
        return Plain()

    kept = Prototypes(build, lambda name: True, most=8)

    async def use(tenant: str, number: int) -> Environment:
        with work_of(tenant):
            return (await kept.get("env", {"number": number})).environment

    assert await use("alice", 0) is not await use("bob", 0)
    for number in range(100):
        await use("bob", number)
    assert built == {"alice": 1, "bob": 100}
    await use("alice", 0)
    assert built["alice"] == 1, "the tenant with the most loses some"
    await kept.close()


async def test_the_memory_of_kept_environments_is_bounded_and_the_largest_tenant_pays(tmp_path: Path) -> None:
    """Rows of a file, inline rows and orders count. 256 dry runs over datasets of millions of rows filled a machine."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"{}\n" * 50_000)
    now, alive, built = 0.0, WeakSet[Environment](), Counter[str]()

    class OfRows(Plain):
        def __init__(self, rows: int) -> None:
            self.rows = IndexedRows(file, array("Q", range(0, 3 * rows, 3)))

        def prompts(self, split: Split) -> Any:
            return self.rows if split == "train" else []

    async def build(name: str, options: dict[str, Any]) -> Environment:
        built[TENANT.get()] += 1
        alive.add(environment := OfRows(options["rows"]))
        return environment

    kept = Prototypes(build, lambda name: name == "builtin", most_bytes=100_000, clock=lambda: now)

    async def use(tenant: str, rows: int, number: int, name: str = "builtin", inline: int = 0) -> int:
        """How often the tenant's were built. The split is opened, and an order drawn."""
        nonlocal now
        with work_of(tenant):
            one = await kept.get(name, {"rows": rows, "number": number, "inline": "x" * inline})
        assert one.splits["train"].take(0, 1, 0, True, wrap=True) == ([b"{}"], rows)
        now += 2
        return built[tenant]

    def there() -> int:
        gc.collect()
        return len(alive)

    assert await use("alice", 1000, 0) == 1  # 12,000 bytes with its order
    for number in range(4):
        await use("bob", 1000, number)
    assert there() == 5, "they fit"
    for number in range(4, 12):
        await use("bob", 1000, number)
    assert (left := there()) < 10, "as many as fit"
    assert await use("alice", 1000, 0) == 1, "the small tenant's is still there"
    await use("bob", 1, 99, inline=6000)
    assert there() < left, "inline rows count with the objects made of them"
    await use("carol", 50_000, 0)
    assert await use("alice", 1000, 0) == 1
    assert await use("carol", 50_000, 0) == 2, "one that exceeds all alone runs, and is not kept"
    for number in range(20):
        await use("bob", 1000, number, name="users")
    assert there() >= 20, "a user's host keeps a user's"
    await kept.close()
