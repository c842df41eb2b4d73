"""The replies of an agent's episode, as a tree, and the trajectories that they make. Pure.

* A reply belongs below the reply whose token sequence its prompt extends, and else begins a separate sequence. So a
  branch shares the tokens before it, whichever of several calls, sub-agents or retries made it.
* A trajectory follows a reply, its first successor, the first successor of that one, and so on; every further
  successor begins another trajectory. Tokens that an earlier trajectory has are no action in a later one: each sampled
  token is trained on at most once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from rookery.controller.jobs.trajectory import AssistantTurn, Trajectory, with_policy
from rookery.protocol import ChatMessage

NONE = -1
"""The index of no reply."""


class AgentTurn(AssistantTurn, kw_only=True):
    """One reply to a call of an agent, stored as soon as it is complete."""

    call: int
    """The call's number, which names its request."""
    parent: int = NONE
    """The index, among the episode's replies, of the one that it follows."""
    added: list[int] = msgspec.field(default_factory=list)
    """The tokens between the parent's and its own: the whole prompt where it has no parent."""
    messages: list[ChatMessage] = msgspec.field(default_factory=list)
    """The messages of the call in addition to the parent's."""
    history: bytes = b""
    """The digest of the conversation up to this reply; empty where the call gave token ids."""
    options: bytes = b""
    """The digest of prompt and options: a repeated call has the same."""
    trained: bool = True
    """Whether it was sampled as the trainer computes it: with the job's temperature, and nothing else."""


agent_turns_decoder = msgspec.msgpack.Decoder(list[AgentTurn])


def decode_agent_turns(turns: bytes, first: str) -> list[AgentTurn]:
    """As :func:`~rookery.controller.jobs.trajectory.decode_turns`, for the turns of an agent."""
    return with_policy(agent_turns_decoder.decode(turns), first) if turns else []


@dataclass
class TurnTree:
    """The replies of one attempt at an episode."""

    turns: list[AgentTurn] = field(default_factory=list)
    _children: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, turn in enumerate(self.turns):
            self._children.setdefault(turn.parent, []).append(index)

    def add(self, turn: AgentTurn) -> int:
        """Returns the index of the reply."""
        self.turns.append(turn)
        index = len(self.turns) - 1
        self._children.setdefault(turn.parent, []).append(index)
        return index

    def path(self, index: int) -> list[int]:
        """The indexes of the replies from the first one to ``index``."""
        found: list[int] = []
        while index != NONE:
            found.append(index)
            index = self.turns[index].parent
        return found[::-1]

    def sequence(self, index: int) -> list[int]:
        """The tokens up to the end of a reply."""
        return [token for one in self.path(index) for token in (*self.turns[one].added, *self.turns[one].tokens)]

    def parent_of(self, prompt: Sequence[int], model: Sequence[bool]) -> tuple[int, int]:
        """The reply with the longest sequence that ``prompt`` extends, and the length of that; ``model``: by index,
        whether the reply is of the prompt's base model."""
        best = (NONE, 0)
        waiting = [(index, 0) for index in self._children.get(NONE, ())]
        while waiting:
            index, at = waiting.pop()
            turn = self.turns[index]
            middle, end = at + len(turn.added), at + len(turn.added) + len(turn.tokens)
            if not model[index] or end > len(prompt):
                continue
            if prompt[at:middle] != turn.added or prompt[middle:end] != turn.tokens:
                continue
            if end > best[1]:
                best = (index, end)
            waiting += [(child, end) for child in self._children.get(index, ())]
        return best

    def lines(self) -> Iterator[list[int]]:
        """The indexes of each trajectory's replies, from the first to the last of its path."""
        starts = list(self._children.get(NONE, ()))
        while starts:
            index = starts.pop(0)
            line = self.path(index)
            branches: list[int] = []
            while successors := self._children.get(index):
                index, *others = successors
                line.append(index)
                branches += others
            yield line
            starts = branches + starts

    def line_of(self, parent: int, call: int) -> str:
        """The name of the trajectory that a reply to ``call`` below ``parent`` extends; empty for the first one."""
        if self._children.get(parent):
            return f".{call}"
        while parent != NONE and self._children[self.turns[parent].parent][0] == parent:
            parent = self.turns[parent].parent
        return "" if parent == NONE else f".{self.turns[parent].call}"


@dataclass
class Assembled:
    """The trajectories of an episode, and its replies in the order of their tokens."""

    trajectories: list[Trajectory]
    order: list[int]
    """The indexes of the replies."""


def assemble(tree: TurnTree) -> Assembled:
    """A trajectory that has nothing to be trained on stays, for readers."""
    trajectories: list[Trajectory] = []
    order: list[int] = []
    done: set[int] = set()
    for line in tree.lines():
        trajectory = Trajectory(prompt=list(tree.turns[line[0]].added))
        for index in line:
            turn = tree.turns[index]
            if index != line[0]:
                trajectory.append_observation(turn.added)
            if index in done or not turn.trained:
                trajectory.append_observation(turn.tokens)
            else:
                trajectory.append_action(turn, turn.policy)
            if index not in done:
                order.append(index)
                done.add(index)
        trajectories.append(trajectory)
    return Assembled(trajectories, order)
