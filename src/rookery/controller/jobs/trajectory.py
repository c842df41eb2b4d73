"""The trajectories of an episode: token ids as they were sampled, and the version that sampled each.

Text is never tokenized again. A turn extends the token sequence; where the chat template would not extend it, a new
trajectory begins, and the episode has several.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import msgspec

from rookery.protocol import ChatMessage, TokenLog


class ReplySpan(msgspec.Struct, array_like=True):
    """The tokens of one reply in a trajectory, from ``start`` to before ``stop``."""

    start: int
    stop: int
    policy: str
    """Its name in the job."""


class Trajectory(TokenLog, kw_only=True):
    """One token sequence. ``prompt`` precedes the first reply; the log and ``mask`` have one entry per token after it.

    Where ``mask`` is False the token is no policy's, but the environment's (or the template's): no loss, log-prob 0,
    version -1. ``replies`` says which policy sampled the others."""

    prompt: list[int]
    mask: list[bool] = msgspec.field(default_factory=list)
    replies: list[ReplySpan] = msgspec.field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def num_action_tokens(self) -> int:
        """Tokens that policies sampled."""
        return sum(self.mask)

    def append_action(self, sampled: TokenLog, policy: str) -> None:
        """Append tokens that ``policy`` sampled."""
        self.replies.append(ReplySpan(len(self.tokens), len(self.tokens) + len(sampled.tokens), policy))
        self.extend(sampled.tokens, sampled.logprobs, sampled.versions)
        self.mask.extend([True] * len(sampled.tokens))

    def append_observation(self, tokens: Sequence[int]) -> None:
        """Append tokens of the environment."""
        self.extend(tokens, [0.0] * len(tokens), [-1] * len(tokens))
        self.mask.extend([False] * len(tokens))

    def of(self, policy: str) -> Trajectory:
        """The trajectory as ``policy`` is trained on it: the tokens of others are as the environment's."""
        mine = [False] * len(self.tokens)
        for reply in self.replies:
            if reply.policy == policy:
                mine[reply.start : reply.stop] = [True] * (reply.stop - reply.start)
        return Trajectory(
            self.tokens,
            [logprob if own else 0.0 for logprob, own in zip(self.logprobs, mine, strict=True)],
            [version if own else -1 for version, own in zip(self.versions, mine, strict=True)],
            prompt=self.prompt,
            mask=mine,
            replies=[reply for reply in self.replies if reply.policy == policy],
        )


class AssistantTurn(TokenLog, kw_only=True):
    """One completed reply of a policy, stored as soon as it is complete."""

    finish: str
    text: str
    workers: list[tuple[int, str]] = msgspec.field(default_factory=list)
    """As in :attr:`SamplingResult.workers <rookery.controller.rollout.request.SamplingResult.workers>`."""
    queue_seconds: float = 0.0
    generation_seconds: float = 0.0
    policy: str = ""
    """Its name in the job. Revision 0001 of the database stored none where the job has only one: :func:`decode_turns`
    gives it to these."""
    delivered: bool = False
    """Whether the response to the call of an agent was sent. Else a repeated call gets this reply, and none is
    sampled."""


Turn = TypeVar("Turn", bound=AssistantTurn)


class TurnRecord(msgspec.Struct, array_like=True):
    """The reward and the duration of one turn of an episode; for readers only."""

    reward: float
    metrics: dict[str, float]
    finish: str
    """Why the reply ended: stop or length."""
    tokens: int
    """Length of the reply."""
    queue_seconds: float
    generation_seconds: float
    environment_seconds: float
    workers: list[tuple[int, str]]
    policy: str = ""
    """The policy that replied."""
    rewards: dict[str, float] = {}
    """By policy, in addition to ``reward``."""
    trained: bool = True
    """False for a call of an agent whose tokens are read and not trained on."""
    message: int = -1
    """The index of the reply in the conversation; -1 in episodes stored by revision 0001 of the database."""
    follows: int | None = None
    """Of an agent's call that does not continue the turn before it: the index of the turn that it continues; -1 where
    it begins a conversation."""


class EpisodeResult(msgspec.Struct):
    """A finished episode."""

    trajectories: list[Trajectory]
    turns: list[ChatMessage]
    """The conversation, the policies' replies included."""
    replies: list[str]
    """The policies' replies, one per turn."""
    reward: float
    """The part of the reward that every policy gets."""
    metrics: dict[str, float]
    finish: str
    """done, max_turns or context."""
    seconds: dict[str, float] = {}
    """Seconds by stage, in the process that ended it: ``queue`` (requests waited for a worker), ``generation`` (a
    worker had them), ``environment`` (its calls)."""
    steps: list[TurnRecord] = []
    """One per reply."""
    rewards: dict[str, float] = {}
    """The additional rewards of single policies."""
    speakers: list[str] = []
    """The policy of each of ``replies``. Revision 0001 of the database stored none where the job has only one:
    :func:`decode_result` gives them to these."""

    def of(self, policy: str) -> EpisodeResult | None:
        """The episode as ``policy`` is trained on it; None if it has no reply in it."""
        if policy not in self.speakers:
            return None
        reward = self.reward + self.rewards.get(policy, 0.0)
        if all(speaker == policy for speaker in self.speakers):
            return msgspec.structs.replace(self, reward=reward)
        return msgspec.structs.replace(
            self,
            trajectories=[trajectory.of(policy) for trajectory in self.trajectories],
            replies=[reply for reply, speaker in zip(self.replies, self.speakers, strict=True) if speaker == policy],
            reward=reward,
        )

    @property
    def sampled(self) -> Counter[int]:
        """Number of tokens by the version that sampled them."""
        versions = chain.from_iterable(trajectory.versions for trajectory in self.trajectories)
        return Counter(version for version in versions if version >= 0)

    @property
    def versions(self) -> set[int]:
        return set(self.sampled)

    @property
    def num_action_tokens(self) -> int:
        return sum(trajectory.num_action_tokens for trajectory in self.trajectories)


turns_decoder = msgspec.msgpack.Decoder(list[AssistantTurn])
episode_result_decoder = msgspec.msgpack.Decoder(EpisodeResult)


class EncodedTurns:
    """The replies of an episode as they are stored. Each is encoded when it is new, not each time that one is added."""

    def __init__(self) -> None:
        self._encoded: list[tuple[bool, bytes]] = []
        """By index: whether its response was sent, and the reply."""

    def parts(self, turns: Sequence[AssistantTurn]) -> list[bytes]:
        """The encoding of ``turns`` in parts. Of replies that were encoded before, only ``delivered`` may change."""
        del self._encoded[len(turns) :]
        for index, turn in enumerate(turns):
            if index == len(self._encoded):
                self._encoded.append((turn.delivered, _encoder.encode(turn)))
            elif self._encoded[index][0] != turn.delivered:
                self._encoded[index] = (turn.delivered, _encoder.encode(turn))
        return [_ARRAY + len(turns).to_bytes(4, "big"), *(part for _, part in self._encoded)]


_encoder = msgspec.msgpack.Encoder()
_ARRAY = b"\xdd"
"""How an array begins in MessagePack, before its length in four bytes."""


def with_policy(turns: list[Turn], first: str) -> list[Turn]:
    """``turns``, which were stored, with ``first`` as the policy of those that were stored without one: the job has no
    other."""
    for turn in turns:
        turn.policy = turn.policy or first
    return turns


def decode_turns(turns: bytes, first: str) -> list[AssistantTurn]:
    """The completed turns that are stored with an episode. ``first``: as for :func:`with_policy`."""
    return with_policy(turns_decoder.decode(turns), first) if turns else []


def decode_result(result: bytes, first: str) -> EpisodeResult:
    """The stored result of an episode. ``first``: as for :func:`with_policy`."""
    found = episode_result_decoder.decode(result)
    found.speakers = found.speakers or [first] * len(found.replies)
    return found


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**63) that depends on all ``parts`` and on nothing else."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
