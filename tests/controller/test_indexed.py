"""A dict with groups, compared with a look at all of its values."""

from __future__ import annotations

from random import Random

import pytest

from rookery.controller.indexed import IndexedDict


@pytest.mark.parametrize("seed", range(20))
def test_groups_have_the_values_that_a_scan_finds(seed: int) -> None:
    random, plain = Random(seed), dict[int, str]()
    indexed: IndexedDict[int, str] = IndexedDict(first=lambda value: value[0], last=lambda value: value[-1])
    for _ in range(300):
        key, value = random.randrange(20), "".join(random.choices("abc", k=3))
        if random.random() < 0.5:
            plain.pop(key, None)  # a new value of a known key is the newest
            plain[key] = indexed[key] = value
        else:
            assert plain.pop(key, None) == indexed.pop(key, None)
        assert indexed == plain and [*indexed] == [*plain] and len(indexed) == len(plain)
        for letter in "abc":
            assert indexed.of(first=letter) == [value for value in plain.values() if value[0] == letter]
            assert indexed.count(first=letter) == len(indexed.of(first=letter))
            assert indexed.has(last=letter) == any(value[-1] == letter for value in plain.values())
        assert set(indexed.groups("last")) == {value[-1] for value in plain.values()}
