"""What an episode leaves: token ids as they were sampled, and where each came from.

Text is never tokenised again. A turn extends the sequence; where a chat template would not extend it, a new trajectory
begins, and the episode has several.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import msgspec

from rookery.protocol import ChatMessage


class Trajectory(msgspec.Struct):
    """One sequence. ``prompt`` is what the first reply answered; the other lists have one entry per token after it.

    Where ``mask`` is False the token is the environment's (or the template's): no loss, log-prob 0, version -1."""

    prompt: list[int]
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def num_action_tokens(self) -> int:
        """How many of the tokens the policy sampled."""
        return sum(self.mask)

    def append_action(self, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """The policy's tokens."""
        self.tokens.extend(tokens)
        self.mask.extend([True] * len(tokens))
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def append_observation(self, tokens: Sequence[int]) -> None:
        """The environment's tokens."""
        self.tokens.extend(tokens)
        self.mask.extend([False] * len(tokens))
        self.logprobs.extend([0.0] * len(tokens))
        self.versions.extend([-1] * len(tokens))


class AssistantTurn(msgspec.Struct):
    """One completed reply, durable as soon as it is complete."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: str
    text: str


class EpisodeResult(msgspec.Struct):
    """A finished episode."""

    trajectories: list[Trajectory]
    turns: list[ChatMessage]
    """The conversation, the policy's replies included."""
    replies: list[str]
    """What the policy said, turn by turn."""
    reward: float
    metrics: dict[str, float]
    finish: str
    """done, max_turns or context."""
    seconds: dict[str, float] = {}
    """Where its time went, as far as the process that ended it saw: ``queue`` (requests waited for a place in a
    worker), ``generation`` (they were with one), ``environment`` (it was asked)."""

    @property
    def sampled(self) -> Counter[int]:
        """How many of its tokens each version sampled."""
        versions = chain.from_iterable(trajectory.versions for trajectory in self.trajectories)
        return Counter(version for version in versions if version >= 0)

    @property
    def versions(self) -> set[int]:
        return set(self.sampled)

    @property
    def num_action_tokens(self) -> int:
        return sum(trajectory.num_action_tokens for trajectory in self.trajectories)


turns_decoder = msgspec.msgpack.Decoder(list[AssistantTurn])
outcome_decoder = msgspec.msgpack.Decoder(EpisodeResult)


def decode_turns(turns: bytes) -> list[AssistantTurn]:
    """The completed turns that are stored with an episode."""
    return turns_decoder.decode(turns) if turns else []


def derive(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on all ``parts`` and on nothing else."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
