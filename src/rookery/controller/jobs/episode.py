"""One episode: the environment and the policy take turns until the environment is done.

* An episode that waits for its environment holds no engine slot, one that waits for the engine holds no environment
  thread.
* Completed turns are handed to ``save`` before the environment hears of them. An episode goes on from its saved turns:
  they are told to the environment again, which answers from memory if it is the same process, or replays them if it
  declared itself deterministic.
* A reply begins with the version that its job says, and may end on a newer one; every token keeps its own.
* The environment is kept until :meth:`Episode.close`, to be called when the episode's end is stored; one that is
  cancelled is not closed, so that it can be gone on with.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import msgspec

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.env_hosts import EnvironmentFailed, EnvironmentHost, EnvironmentHosts, HostLost
from rookery.controller.jobs.trajectory import AssistantTurn, EpisodeResult, Trajectory, derive
from rookery.controller.rollout.scheduler import RolloutScheduler, SamplingRequest
from rookery.errors import RookeryError
from rookery.spec.job import InFlight, JobSpec
from rookery.tokenization.chat import Chat

REPLAY_LIMIT = 3
"""Times an episode is replayed in another host before it fails: more means the environment kills its hosts."""


LARGEST_REWARD = 1e15
"""Beyond it the squares of what follows from a reward (advantages, gradients) leave the range of float32."""


class EpisodeFailed(RookeryError):
    """The episode cannot be finished; its group goes on without it."""


@dataclass
class StageCounts:
    """How many episodes of a job are where, for its owner to see."""

    engine: int = 0
    environment: int = 0


@dataclass
class Episode:
    """What one episode needs from the world around it."""

    id: str
    tenant: str
    owner: str
    """Whose environment hosts may run it: the tenant, or the service."""
    job: str
    spec: JobSpec
    options: dict[str, object]
    """The environment's options, datasets resolved."""
    model: str
    chat: Chat
    adapter: Callable[[], AbstractContextManager[protocol.AdapterRef]]
    """The version that the next reply begins with; it stays available within."""
    prompt: bytes
    seed: int
    environment_seed: int
    hosts: EnvironmentHosts
    rollouts: RolloutScheduler
    clock: Clock
    phases: StageCounts
    save: Callable[[list[AssistantTurn], str], Awaitable[None]]
    """Makes the completed turns durable, with the host instance that the episode runs in."""
    said: list[AssistantTurn] = field(default_factory=list)
    instance: str = ""
    """The host instance that ran the saved turns."""
    in_flight: InFlight = "finish"
    """What a reply does when a newer version is published."""
    resumable: bool = True
    """Its turns are saved; one without begins with a new environment each time."""
    splits: int = 0
    """Times that the chat template did not extend the sequence."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where its time went (:attr:`Outcome.seconds`)."""
    _host: EnvironmentHost | None = None
    """Where its environment is."""

    async def run(self) -> EpisodeResult:
        """Play to the end. Raises :class:`EpisodeFailed`; :class:`~rookery.errors.Unavailable` when there is no host
        or no worker to play with."""
        environment = self.spec.environment
        wanted = (self.owner, environment.name)
        for _ in range(REPLAY_LIMIT):
            if self.said and self.instance:
                host = await self.hosts.holder(*wanted, self.instance, environment.return_timeout)
                if host.hello.instance != self.instance and not host.deterministic(environment.name):
                    raise EpisodeFailed("its environment host is gone, and the environment is not deterministic")
            else:
                host = await self.hosts.host_for(*wanted, environment.return_timeout)
            self.instance, self._host = host.hello.instance, host
            if not self.resumable:
                self.hosts.close_episode(host, self.id)  # of an earlier attempt, whose replies are not known
            try:
                return await self._play(host)
            except HostLost as lost:
                if self.said and not lost.deterministic:
                    raise EpisodeFailed(f"{lost}, and the environment is not deterministic") from None
                self.close()
                self.instance = ""
            except EnvironmentFailed as error:
                raise EpisodeFailed(str(error)) from None
        raise EpisodeFailed(f"its environment host was lost {REPLAY_LIMIT} times")

    def close(self) -> None:
        """Let the environment go."""
        if self._host is not None:
            self.hosts.close_episode(self._host, self.id)
            self._host = None

    async def _play(self, host: EnvironmentHost) -> EpisodeResult:
        environment = self.spec.environment
        trajectories: list[Trajectory] = []
        metrics: dict[str, float] = {}
        reward, finish, self.splits = 0.0, "max_turns", 0
        observed = await self._observe(host, self._reset())
        conversation = list(observed.messages)
        heard = list(observed.messages)
        for turn in range(environment.max_turns):
            if not self._extend(trajectories, conversation[: len(conversation) - len(heard)], heard, turn):
                finish = "context"
                break
            said = self.said[turn] if turn < len(self.said) else await self._sample(trajectories[-1], turn)
            trajectories[-1].append_action(said.tokens, said.logprobs, said.versions)
            conversation.append(protocol.ChatMessage(role="assistant", content=said.text))
            observed = await self._observe(host, self._step(turn, said, conversation))
            if not math.isfinite(observed.reward):
                raise EpisodeFailed(f"the environment's reward of turn {turn} is {observed.reward}, not a number")
            reward += observed.reward
            if not abs(reward) <= LARGEST_REWARD:
                raise EpisodeFailed(f"the environment's rewards add up to {reward:g}, allowed: ±{LARGEST_REWARD:g}")
            metrics.update(observed.metrics)
            heard = list(observed.messages)
            conversation += heard
            if observed.done:
                finish = "done"
                break
            if not heard:
                raise EpisodeFailed(f"the environment's step {turn} is not done and has no messages to go on with")
        replies = [said.text for said in self.said]
        return EpisodeResult(trajectories, conversation, replies, reward, metrics, finish, dict(self.seconds))

    def _extend(
        self,
        trajectories: list[Trajectory],
        before: list[protocol.ChatMessage],
        heard: list[protocol.ChatMessage],
        turn: int,
    ) -> bool:
        """Bring the token sequence up to where the next reply begins; False when the context has no room for one."""
        sequence = trajectories[-1].sequence if trajectories else []
        try:
            tokens = None
            if turn > 0:
                last = self.said[turn - 1]
                tokens = self.chat.extend(sequence, _plain(before[:-1]), last.text, last.tokens, _plain(heard))
            extends = tokens is not None
            if tokens is None:
                tokens = self.chat.prompt(_plain(before + heard))
        except RookeryError as error:
            raise EpisodeFailed(str(error)) from None
        if len(tokens) >= self.chat.context:
            if turn == 0:
                raise EpisodeFailed(f"the prompt has {len(tokens)} tokens, the model's context is {self.chat.context}")
            return False
        if extends:
            trajectories[-1].append_observation(tokens[len(sequence) :])
        else:
            self.splits += turn > 0
            trajectories.append(Trajectory(tokens))
        return True

    async def _sample(self, trajectory: Trajectory, turn: int) -> AssistantTurn:
        sequence = trajectory.sequence
        sampling = self.spec.sampling
        self.phases.engine += 1
        began = self.clock.monotonic()
        try:
            with self.adapter() as adapter:
                reply = await self.rollouts.sample(
                    SamplingRequest(
                        self.tenant,
                        self.job,
                        self.model,
                        protocol.Generate(
                            request=f"{self.id}.{turn}",
                            adapter=adapter,
                            prompt=sequence,
                            shared_prefix=len(trajectory.prompt),
                            max_tokens=min(sampling.max_tokens, self.chat.context - len(sequence)),
                            temperature=sampling.temperature,
                            seed=derive(self.seed, turn),
                            stop_tokens=self.chat.stop_tokens,
                            stop=sampling.stop,
                            episode=self.id,
                            in_flight=self.in_flight,
                        ),
                        continues=turn > 0,
                    )
                )
        finally:
            self.phases.engine -= 1
        self.seconds["queue"] += reply.queue_seconds
        self.seconds["generation"] += max(0.0, self.clock.monotonic() - began - reply.queue_seconds)
        said = AssistantTurn(reply.tokens, reply.logprobs, reply.versions, reply.finish, self.chat.decode(reply.tokens))
        self.said.append(said)
        await self.save(self.said, self.instance)
        return said

    async def _observe(
        self, host: EnvironmentHost, message: protocol.Reset | protocol.StepEpisode
    ) -> protocol.Observation:
        environment = self.spec.environment
        self.phases.environment += 1
        began = self.clock.monotonic()
        try:
            return await self.hosts.observe(
                host,
                environment.name,
                message,
                timeout=environment.step_timeout,
                return_timeout=environment.return_timeout,
            )
        finally:
            self.phases.environment -= 1
            self.seconds["environment"] += self.clock.monotonic() - began

    def _reset(self) -> protocol.Reset:
        return protocol.Reset(
            call="",
            episode=self.id,
            job=self.job,
            environment=self.spec.environment.name,
            options=self.options,
            prompt=self.prompt,
            seed=self.environment_seed,
        )

    def _step(self, turn: int, said: AssistantTurn, conversation: list[protocol.ChatMessage]) -> protocol.StepEpisode:
        return protocol.StepEpisode(
            call="", episode=self.id, turn=turn, text=said.text, tokens=said.tokens, messages=conversation
        )


def _plain(turns: list[protocol.ChatMessage]) -> list[dict[str, str]]:
    return [msgspec.structs.asdict(turn) for turn in turns]
