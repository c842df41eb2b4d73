"""The tree of an agent's replies and the trajectories that it makes, for any order of calls."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rookery.controller.jobs.agent_turns import NONE, AgentTurn, TurnTree, agent_turns_decoder, assemble
from rookery.controller.jobs.trajectory import EncodedTurns, Trajectory, decode_turns

Calls = list[tuple[int, list[int], list[int], bool]]
"""Of each call: the reply that it continues, modulo those there are and none; new tokens, sampled tokens, trained."""

CALLS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.lists(st.integers(0, 3), min_size=1, max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


def record(calls: Calls) -> tuple[TurnTree, list[list[int]]]:
    """The tree of these calls, each joined by its prompt alone, and the sequence that each call made."""
    tree, made = TurnTree(), list[list[int]]()
    for number, (choice, new, sampled, trained) in enumerate(calls):
        index = choice % (len(made) + 1) - 1
        prompt = [*(made[index] if index >= 0 else []), *new]
        parent, length = tree.parent_of(prompt, [True] * len(made))
        logprobs = [-0.001 * (number + 1)] * len(sampled)
        tree.add(
            AgentTurn(
                sampled, logprobs, [0] * len(sampled), finish="stop", text="", policy="main",
                call=number, parent=parent, added=prompt[length:], trained=trained,
            )
        )  # fmt: skip
        made.append([*prompt, *sampled])
    return tree, made


@given(CALLS)
def test_every_sampled_token_is_trained_on_at_most_once(calls: Calls) -> None:
    tree, _ = record(calls)
    found = assemble(tree)
    assert sorted(found.order) == list(range(len(calls)))
    actions = [
        (token, logprob)
        for trajectory in found.trajectories
        for token, logprob, action in zip(trajectory.tokens, trajectory.logprobs, trajectory.mask, strict=True)
        if action
    ]
    wanted = [(token, -0.001 * (index + 1)) for index in found.order if calls[index][3] for token in calls[index][2]]
    assert actions == wanted, "in the order of the replies, each once"
    for trajectory in found.trajectories:
        hidden = [version for version, action in zip(trajectory.versions, trajectory.mask, strict=True) if not action]
        assert set(hidden) <= {-1}


@given(CALLS)
def test_every_call_is_the_beginning_of_a_trajectory(calls: Calls) -> None:
    tree, made = record(calls)
    sequences = [trajectory.sequence for trajectory in assemble(tree).trajectories]
    for index, sequence in enumerate(made):
        assert tree.sequence(index) == sequence
        assert any(one[: len(sequence)] == sequence for one in sequences)
    leaves = {index for index in range(len(made)) if index not in {turn.parent for turn in tree.turns}}
    assert len(sequences) == len(leaves), "as few trajectories as there are ends"


@given(CALLS)
def test_a_prompt_belongs_below_the_longest_sequence_that_it_extends(calls: Calls) -> None:
    tree, made = record(calls)
    for index, turn in enumerate(tree.turns):
        prompt = made[index][: -len(turn.tokens)]
        longest = max((len(one) for one in made[:index] if prompt[: len(one)] == one), default=0)
        assert len(prompt) - len(turn.added) == longest
        assert (turn.parent == NONE) == (longest == 0)


def test_other_base_models_share_no_tokens() -> None:
    tree, _ = record([(0, [1], [2], True)])
    assert tree.parent_of([1, 2, 3], [True]) == (0, 2)
    assert tree.parent_of([1, 2, 3], [False]) == (NONE, 0)


def test_a_conversation_without_branches_is_one_trajectory() -> None:
    tree, _ = record([(number, [7, number], [1, 2], True) for number in range(4)])
    plain = Trajectory(prompt=[7, 0])
    for number, turn in enumerate(tree.turns):
        if number:
            plain.append_observation([7, number])
        plain.append_action(turn, "main")
    assert assemble(tree).trajectories == [plain]


@given(CALLS)
def test_names_of_caches_differ_where_sequences_do(calls: Calls) -> None:
    tree, lines = TurnTree(), dict[str, list[int]]()
    whole, made = record(calls)
    for index, turn in enumerate(whole.turns):
        line = tree.line_of(turn.parent, turn.call)
        prompt = made[index][: -len(turn.tokens)]
        before = lines.get(line, [])
        assert prompt[: len(before)] == before, "a cache is extended, never rewritten"
        lines[line] = made[index]
        tree.add(turn)


@given(CALLS)
def test_stored_replies_are_read_as_they_were(calls: Calls) -> None:
    tree, _ = record(calls)
    stored = msgspec.msgpack.encode(tree.turns)
    again = TurnTree(agent_turns_decoder.decode(stored))
    assert assemble(again) == assemble(tree)
    assert [turn.tokens for turn in decode_turns(stored, "main")] == [turn.tokens for turn in tree.turns]


def test_replies_are_encoded_when_they_are_new_or_delivered_and_not_again() -> None:
    encoded, turns, before = EncodedTurns(), list[AgentTurn](), list[bytes]()
    for number in range(70):
        added = AgentTurn([number], [-0.5], [0], finish="stop", text="", call=number, added=[1] * number)
        turns.append(added)
        if number % 3 == 2:
            turns[number - 1].delivered = True
        parts = encoded.parts(turns)
        assert agent_turns_decoder.decode(b"".join(parts)) == turns
        changed = [index for index, (old, new) in enumerate(zip(before, parts[1:], strict=False)) if old is not new]
        assert changed == ([number - 1] if number % 3 == 2 else [])
        before = parts[1:]
    first = decode_turns(msgspec.msgpack.encode(turns[:1]), "main")
    assert decode_turns(b"".join(encoded.parts(turns[:1])), "main") == first
    assert decode_turns(b"".join(encoded.parts([])), "main") == []
