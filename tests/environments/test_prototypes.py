"""Which environments a host keeps built."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any
from weakref import WeakSet

import pytest

from rookery.environments.base import Environment, Split
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
