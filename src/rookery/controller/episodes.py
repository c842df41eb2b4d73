"""Groups and episodes of a job, as people read them: rewards with advantages, turns, tokens.

The source is the database alone, so a job that has ended, or whose process was killed, reads like a running one.
"""

from __future__ import annotations

import codecs
import itertools
import math
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rookery.algorithms.advantages import ADVANTAGES, advantages, has_variance
from rookery.controller.episode_views import (
    EpisodeLine,
    EpisodeReading,
    EpisodeView,
    FailureView,
    GroupPage,
    GroupView,
    MemberView,
    MessageView,
    TokenStrip,
    TrajectoryView,
    TurnView,
)
from rookery.controller.jobs.trajectory import (
    EpisodeResult,
    ReplySpan,
    Trajectory,
    decode_result,
    decode_turns,
)
from rookery.controller.services import Threads
from rookery.errors import UserError
from rookery.scheduling.health import EPISODES_READ, RecentEpisode
from rookery.spec import values
from rookery.spec.job import scored_policy, stored_base_model, stored_policies
from rookery.storage.models import EpisodeRow, GroupRow, GroupState, JobRow
from rookery.storage.repositories import jobs
from rookery.storage.repositories.episodes import (
    EpisodeChoice,
    episodes_page,
    failure_counts,
    get_episode,
    get_group,
    groups_page,
    version_of_step,
)
from rookery.storage.store import Store
from rookery.tokenization.chat import Chat
from rookery.tokenization.registry import status

RECENT_BYTES = 16 << 20
"""Of the texts of recent episodes that are read at once, as they are stored."""

Member = TypeVar("Member", bound=MemberView)


class EpisodeQueries:
    def __init__(self, store: Store, chat: Callable[[str], Awaitable[Chat]], threads: Threads, cache: Path) -> None:
        """``chat`` and ``threads`` as the services have them; ``cache``: where base models are prepared."""
        self._store = store
        self._prepared_chat = chat
        self._encoders, self._openers = threads.encoders, threads.openers
        self._cache = cache

    async def groups(
        self, tenant: str, job: str, *, step: int | None, state: GroupState | None, offset: int, limit: int
    ) -> GroupPage:
        """A page of groups with their episodes' rewards, and the number of all."""
        row = await self._store.read(jobs.get_job, tenant, job)
        consumed = None
        if step is not None:
            consumed = await self._store.read(version_of_step, tenant, job, step)
            if consumed is None:
                return GroupPage(groups=[], total=0, version=None)
        found, total = await self._store.read(
            groups_page, tenant, job, consumed_by=consumed, state=state, offset=offset, limit=limit
        )
        names, version = await self._names(tenant, row), consumed[0] if consumed is not None else None
        groups = await self._encoders(lambda: [_group(group, row.spec, names) for group in found])
        return GroupPage(groups=groups, total=total, version=version)

    async def group(self, tenant: str, job: str, group: str) -> GroupView:
        """One group with the replies of its episodes."""
        row = await self._store.read(jobs.get_job, tenant, job)
        found = await self._store.read(get_group, tenant, job, group)
        return await self._encoders(_whole_group, found, row.spec, await self._names(tenant, row))

    async def episodes(
        self, tenant: str, job: str, chosen: EpisodeChoice
    ) -> tuple[list[EpisodeLine], tuple[float, str] | None]:
        """A page of episodes, newest first, and where the next one begins. A search may end before it found a page."""
        row = await self._store.read(jobs.get_job, tenant, job)
        found = await self._store.read(episodes_page, tenant, job, chosen)
        rows = await self._encoders(lambda: [_line(group, one, row.spec) for group, one in found.episodes])
        return rows, found.next

    async def episode(self, tenant: str, job: str, episode: str) -> EpisodeReading:
        """One episode whole: conversation, turns, and its tokens where its text is kept."""
        row = await self._store.read(jobs.get_job, tenant, job)
        group, found = await self._store.read(get_episode, tenant, job, episode)
        view = await self._encoders(_group, group, row.spec, await self._names(tenant, row))
        scored = {member.episode: member.advantage for member in view.members}
        shown = _member(
            EpisodeReading, found, row.spec, scored.get(found.id), group=group.id, ordinal=group.ordinal,
            seed=found.seed, group_state=group.state, consumed_by=group.consumed_by, uses=view.uses,
            prompt=view.prompt, members=view.members,
            metrics=found.metrics, messages=None, turns=[], trajectories=[], finish=None, seconds=None,
        )  # fmt: skip
        if found.trajectories:
            models = {name: stored_base_model(row.spec, name) for name in stored_policies(row.spec)}
            chats = {model: await self._chat(model) for model in set(models.values())}
            by_policy = {name: chats[model] for name, model in models.items()}
            await self._encoders(_add_texts, shown, found.trajectories, found.train_logprobs, by_policy)
        elif found.turns:
            replies = await self._encoders(decode_turns, found.turns, stored_policies(row.spec)[0])
            shown.messages = [MessageView(role="assistant", content=reply.text) for reply in replies]
        return shown

    async def trajectories(self, tenant: str, job: str, limit: int, version: int | None = None) -> list[EpisodeView]:
        """The episodes that ended last, as far as :data:`RECENT_BYTES` hold them: text, tokens, log-probabilities,
        versions, reward."""
        row = await self._store.read(jobs.get_job, tenant, job)
        found = await self._store.read(jobs.recent_episodes, tenant, job, limit, version, RECENT_BYTES)
        first = stored_policies(row.spec)[0]
        return await self._encoders(lambda: [_episode(group, episode, first) for group, episode in found])

    async def failures(self, tenant: str, job: str, limit: int) -> list[FailureView]:
        """The most frequent errors of failed episodes."""
        await self._store.read(jobs.get_job, tenant, job)
        found = await self._store.read(failure_counts, tenant, job, limit)
        return [FailureView(error=error, episodes=number) for error, number in found]

    async def recent(self, tenant: str, job: str) -> list[RecentEpisode]:
        """The newest episodes, as alarms read them."""
        row = await self._store.read(jobs.get_job, tenant, job)
        found = await self._store.read(episodes_page, tenant, job, EpisodeChoice(limit=EPISODES_READ))
        first = stored_policies(row.spec)[0]
        return await self._encoders(lambda: [_recent(episode, first) for _, episode in found.episodes])

    async def _names(self, tenant: str, job: JobRow) -> dict[str, str]:
        """The names of a job's policies by their ids; empty where it has one."""
        if len(stored_policies(job.spec)) < 2:
            return {}
        return {policy.id: policy.name for policy in await self._store.read(jobs.policies, tenant, job.id)}

    async def _chat(self, model: str) -> Chat | None:
        """The tokenizer of a base model; None where it is not on this machine: nothing is fetched to show a text."""
        if await self._openers(lambda: status(self._cache, model).state) != "prepared":
            return None
        try:
            return await self._prepared_chat(model)
        except UserError:
            return None


def algorithm(spec: Any) -> str:
    """The name of a stored job's algorithm."""
    return str((spec.get("algorithm") or {}).get("name", "grpo"))


def shown_prompt(stored: bytes) -> Any:
    """A prompt as results show it; None where it is not kept any more."""
    return values.decode(stored) if stored else None


def _group(group: GroupRow, spec: Mapping[str, Any], names: Mapping[str, str]) -> GroupView:
    """A group of a job with this ``spec``; ``names``: of its policies by their ids, where it has several."""
    name = algorithm(spec)
    done = [episode for episode in group.episodes if episode.state == "done"]
    rewards = [episode.reward for episode in done if episode.reward is not None]
    scores: dict[str, float] = {}
    if len(rewards) == len(done) >= 2 and all(map(math.isfinite, rewards)) and name in ADVANTAGES:
        scores = dict(zip((episode.id for episode in done), advantages(name, rewards), strict=True))
    closed = group.state in ("ready", "consumed")
    return GroupView(
        group=group.id, ordinal=group.ordinal, state=group.state, reason=group.reason, consumed_by=group.consumed_by,
        uses={names[id]: version for id, version in (group.uses or {}).items() if id in names and (version or -1) >= 0},
        policy=scored_policy(spec), min_version=group.min_version, created=group.created, finished=group.finished,
        prompt=shown_prompt(group.prompt),
        zero_variance=closed and len(rewards) >= 2 and not has_variance(rewards),
        members=[_member(MemberView, episode, spec, scores.get(episode.id)) for episode in group.episodes],
    )  # fmt: skip


def _whole_group(group: GroupRow, spec: Mapping[str, Any], names: Mapping[str, str]) -> GroupView:
    """A group with the replies of its episodes."""
    view = _group(group, spec, names)
    view.members = [
        member.model_copy(update=_texts(episode, stored_policies(spec)))
        for member, episode in zip(view.members, group.episodes, strict=True)
    ]
    return view


def _line(group: GroupRow, episode: EpisodeRow, spec: Mapping[str, Any]) -> EpisodeLine:
    """An episode of a list of a job with this ``spec``."""
    return _member(
        EpisodeLine, episode, spec, None, group=group.id, ordinal=group.ordinal, consumed_by=group.consumed_by,
        prompt=shown_prompt(group.prompt), **_texts(episode, stored_policies(spec)),
    )  # fmt: skip


def _member(
    kind: type[Member], episode: EpisodeRow, spec: Mapping[str, Any], advantage: float | None, **more: Any
) -> Member:
    """The view of an episode in its group; ``more`` are the further fields of this kind of view."""
    return kind(
        policy=scored_policy(spec),
        episode=episode.id, member=episode.member, state=episode.state, version=episode.version,
        reward=episode.reward, advantage=advantage, error=episode.error, finished=episode.finished, **more,
    )  # fmt: skip


def _texts(episode: EpisodeRow, policies: Sequence[str]) -> dict[str, Any]:
    """The replies of an episode, their policies where the job has several of these, their length and end; empty where
    its text is not kept."""
    if episode.trajectories:
        outcome = decode_result(episode.trajectories, policies[0])
        length, speakers = outcome.num_action_tokens, outcome.speakers if len(policies) > 1 else []
        return {"replies": outcome.replies, "speakers": speakers, "tokens": length, "finish": outcome.finish,
                "metrics": outcome.metrics}  # fmt: skip
    replies = decode_turns(episode.turns, policies[0])
    length, speakers = sum(len(reply.tokens) for reply in replies), [reply.policy for reply in replies]
    return {"replies": [reply.text for reply in replies], "speakers": speakers if len(policies) > 1 else [],
            "tokens": length, "finish": None, "metrics": episode.metrics}  # fmt: skip


def _recent(episode: EpisodeRow, first: str) -> RecentEpisode:
    failed = episode.state == "failed"
    if not episode.trajectories:
        return RecentEpisode(failed, episode.reward, (), (), episode.error)
    outcome = decode_result(episode.trajectories, first)
    finishes = [step.finish for step in outcome.steps]
    rewards = {name: outcome.reward + outcome.rewards.get(name, 0.0) for name in {*outcome.speakers}}
    return RecentEpisode(failed, episode.reward, outcome.replies, finishes, speakers=outcome.speakers, rewards=rewards)


def _add_texts(shown: EpisodeReading, stored: bytes, logprobs: bytes, chats: Mapping[str, Chat | None]) -> None:
    """Fill in the part of an episode's view that its stored text holds. ``chats``: by policy, that of the job's first
    one first."""
    outcome = decode_result(stored, next(iter(chats)))
    replies = [index for index, message in enumerate(outcome.turns) if message.role == "assistant"]
    for step, index in zip(reversed(outcome.steps), reversed(replies), strict=False):
        step.message = index if step.message < 0 else step.message  # the last replies: examples of a prompt come first
    shown.messages = [MessageView.model_validate(message) for message in outcome.turns]
    shown.turns = [TurnView.model_validate(step) for step in outcome.steps]
    shown.trajectories = _token_strips(outcome, logprobs, chats)
    shown.finish, shown.seconds = outcome.finish, outcome.seconds


def _token_strips(outcome: EpisodeResult, stored: bytes, chats: Mapping[str, Chat | None]) -> list[TokenStrip]:
    """Each trajectory with the text of its tokens, the trainer's log-probabilities, and where another worker began."""
    trainer = _trainer_logprobs(outcome.trajectories, stored)
    workers = _workers(outcome)
    return [
        TokenStrip(
            **msgspec.to_builtins(trajectory),
            prompt_texts=_pieces(trajectory.prompt, _chat_of(trajectory, chats)),
            texts=_pieces(trajectory.tokens, _chat_of(trajectory, chats)),
            trainer_logprobs=trainer[number] if trainer else None,
            workers=workers[number],
        )
        for number, trajectory in enumerate(outcome.trajectories)
    ]


def _chat_of(trajectory: Trajectory, chats: Mapping[str, Chat | None]) -> Chat | None:
    """All tokens of a trajectory are of one base model: that of the policies that replied in it."""
    names = [reply.policy for reply in trajectory.replies if reply.policy in chats]
    return chats[names[0]] if names else next(iter(chats.values()))


def _pieces(tokens: Sequence[int], chat: Chat | None) -> list[str] | None:
    """The text that each token completes: a letter whose bytes are in several tokens is that of the last of them."""
    if chat is None:
        return None
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    last = len(tokens) - 1
    return [decode(chat.token_bytes.written(token), final=at == last) for at, token in enumerate(tokens)]


def _trainer_logprobs(trajectories: Sequence[Trajectory], stored: bytes) -> list[list[float | None]]:
    """The trainer's log-probability of each token of each trajectory, of which ``stored`` has the sampled ones in
    order; empty if nothing fits."""
    kept = _decode_logprobs(stored)
    if len(kept) != sum(trajectory.num_action_tokens for trajectory in trajectories):
        return []
    left = iter(kept)
    return [[next(left) if action else None for action in trajectory.mask] for trajectory in trajectories]


def _workers(outcome: EpisodeResult) -> list[list[tuple[int, str]]]:
    """The tokens of each trajectory at which another worker began to sample, with its name."""
    found: list[list[tuple[int, str]]] = [[] for _ in outcome.trajectories]
    actions = _actions(outcome)
    begin, last = 0, ""
    for step in outcome.steps:
        for offset, worker in step.workers if step.trained else ():
            if worker != last and begin + offset < len(actions):
                number, at = actions[begin + offset]
                found[number].append((at, worker))
                last = worker
        begin += step.tokens if step.trained else 0
    return found


def _actions(outcome: EpisodeResult) -> list[tuple[int, int]]:
    """The position of each sampled token, ``(trajectory, token)``, in the order in which they were sampled: those of
    policies on several base models are in separate trajectories."""
    spans: dict[str, deque[tuple[int, ReplySpan]]] = defaultdict(deque)
    for number, trajectory in enumerate(outcome.trajectories):
        for reply in trajectory.replies:
            spans[reply.policy].append((number, reply))
    found: list[tuple[int, int]] = []
    trained = [step.trained for step in outcome.steps] or [True] * len(outcome.speakers)
    for speaker in itertools.compress(outcome.speakers, trained):
        number, reply = spans[speaker].popleft()
        found += [(number, at) for at in range(reply.start, reply.stop)]
    return found


def _decode_logprobs(stored: bytes) -> list[float]:
    """The log-probabilities in stored float32 numbers, little-endian."""
    numbers = array("f")
    numbers.frombytes(stored[: len(stored) // 4 * 4])
    if sys.byteorder == "big":
        numbers.byteswap()
    return list(numbers)


def _episode(group: GroupRow, episode: EpisodeRow, first: str) -> EpisodeView:
    """``first``: the job's first policy."""
    kept: dict[str, Any] = {}
    if episode.trajectories:
        result = decode_result(episode.trajectories, first)
        kept["messages"] = [MessageView.model_validate(message) for message in result.turns]
        kept["trajectories"] = [TrajectoryView.model_validate(one) for one in result.trajectories]
        kept |= {"finish": result.finish, "seconds": result.seconds}
    return EpisodeView(
        episode=episode.id,
        group=group.id,
        ordinal=group.ordinal,
        group_state=group.state,
        consumed_by=group.consumed_by,
        prompt=shown_prompt(group.prompt),
        state=episode.state,
        version=episode.version,
        reward=episode.reward,
        metrics=episode.metrics,
        error=episode.error,
        finished=episode.finished,
        **kept,
    )
