"""Prompts share the numbers of their tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.tokenization.token_ids import MOST_IDS, shared_ids

IDS = st.integers(0, 200_000) | st.integers(-(1 << 40), 1 << 40) | st.sampled_from([MOST_IDS - 1, MOST_IDS])


@settings(max_examples=examples(50), deadline=None)
@given(tokens=st.lists(IDS, max_size=20))
def test_a_shared_list_has_the_same_numbers(tokens: list[int]) -> None:
    shared = shared_ids(tokens)
    assert shared == tokens and shared is not tokens


def test_two_prompts_hold_each_number_once() -> None:
    def made() -> Sequence[int]:
        """Numbers that no other list has, as a tokenizer makes them."""
        return [int(str(token)) for token in range(50_000, 50_100)]

    assert all(one is other for one, other in zip(shared_ids(made()), shared_ids(made()), strict=True))
    assert not any(one is other for one, other in zip(made(), made(), strict=True))


def test_threads_that_meet_larger_ids_at_once_keep_the_order() -> None:
    found: list[list[int]] = []
    barrier = threading.Barrier(4)

    def read(first: int) -> None:
        barrier.wait()
        for most in range(first, first + 4000, 7):
            found.append(shared_ids([most, 0, most // 2]))

    threads = [threading.Thread(target=read, args=(300_000 + 11 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(middle == most // 2 and first == 0 for most, first, middle in found)
    assert len(found) == 4 * len(range(0, 4000, 7))
