"""One episode: the environment and the policy alternate until the environment is done.

* An episode that waits for its environment holds no engine slot; one that waits for the engine holds no environment
  thread.
* Completed turns of a training episode are stored before the environment gets them. A resumed episode starts from its
  stored turns: the environment gets them again, and answers from memory if it is the same process, or replays them if
  it declared itself deterministic.
* A reply begins with the version that its job prescribes and may end on a newer one; every token keeps its version.
* The environment is kept until :meth:`Episode.end`, to be called when the episode's end is stored. A cancelled episode
  is not ended, so that it can be resumed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from rookery import protocol
from rookery.aio import first_of
from rookery.bounds import metrics_problem
from rookery.controller.fleet.agents import AgentFailed, AgentOutcome, AgentSession
from rookery.controller.fleet.env_hosts import EnvironmentFailed, EnvironmentHost, HostLost
from rookery.controller.jobs.agent_calls import AgentCalls
from rookery.controller.jobs.agent_turns import AgentTurn, decode_agent_turns
from rookery.controller.jobs.job_context import JobContext, JobPolicy, Progress
from rookery.controller.jobs.trajectory import (
    AssistantTurn,
    EncodedTurns,
    EpisodeResult,
    Trajectory,
    TurnRecord,
    decode_turns,
    derive_seed,
)
from rookery.controller.rollout.request import GenerationFailed, SamplingRequest, SamplingResult
from rookery.environments.verifiers.parts import opened_thought
from rookery.errors import RookeryError, count_of
from rookery.spec.job import AGENT
from rookery.spec.policy import InFlight
from rookery.storage.models import EpisodeRow
from rookery.storage.repositories import jobs
from rookery.telemetry.spans import TraceSpan
from rookery.telemetry.tracing import TracedCall
from rookery.tokenization.chat import PromptTooLong, read_tokens, tokenized

REPLAY_LIMIT = 3
"""Times an episode is replayed in another host before it fails: more means the environment kills its hosts."""

LARGEST_REWARD = 1e15
"""Beyond it the squares of quantities derived from a reward (advantages, gradients) leave the range of float32."""


class EpisodeFailed(RookeryError):
    """The episode cannot be finished; its group continues without it."""


@dataclass
class _Sequence:
    """The conversation in the tokens of one base model."""

    model: str
    tokens: Trajectory
    reply: AssistantTurn = field(default_factory=lambda: AssistantTurn([], [], [], finish="", text=""))
    """The last reply in it, after which so many messages were in the conversation."""
    messages: int = 0


@dataclass
class _Earned:
    """The sums over the steps of an environment."""

    reward: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    """By policy, in addition."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Played:
    """An episode as far as it was played."""

    conversation: list[protocol.ChatMessage]
    sequences: list[_Sequence] = field(default_factory=list)
    steps: list[TurnRecord] = field(default_factory=list)
    speakers: list[str] = field(default_factory=list)
    """The policy of each reply."""
    earned: _Earned = field(default_factory=_Earned)
    finish: str = "max_turns"

    def add_reply(self, sequence: _Sequence, reply: AssistantTurn, speaker: str) -> None:
        """``speaker`` has replied to the end of ``sequence``."""
        sequence.tokens.append_action(reply, speaker)
        self.speakers.append(speaker)
        self.conversation.append(protocol.ChatMessage(role="assistant", content=reply.text))
        sequence.reply, sequence.messages = reply, len(self.conversation)


class StoredEpisode:
    """The record of an episode of a group: its turns are stored, and a second attempt takes up those stored before."""

    split: ClassVar[Literal["train", "eval"]] = "train"
    resumes: ClassVar[bool] = True
    """Whether a second attempt continues in the environment of the first one."""

    def __init__(self, row: EpisodeRow, progress: Progress) -> None:
        self.group = row.group_id
        self.host = row.host_instance
        """The host instance that ran the turns."""
        self.keys = row.agent_keys.split()
        """Hashes of the keys of the agent that drives it."""
        self._row = row
        self._progress = progress
        self._encoded = EncodedTurns()

    def turns(self, first: str) -> list[AssistantTurn]:
        """``first``: as for :func:`decode_turns`."""
        return decode_turns(self._row.turns, first)

    def agent_turns(self, first: str) -> list[AgentTurn]:
        return decode_agent_turns(self._row.turns, first)

    async def save(self, turns: Sequence[AssistantTurn], **values: Any) -> None:
        """Make all replies durable, with further ``values`` of
        :func:`~rookery.storage.repositories.jobs.save_turns`."""
        await self._progress.store(jobs.save_turns, self._row.id, self._encoded.parts(turns), **values)


class PassingEpisode:
    """The record of an episode of an evaluation: nothing is stored, a second attempt starts with a new environment."""

    split: ClassVar[Literal["train", "eval"]] = "eval"
    resumes: ClassVar[bool] = False
    group = host = ""
    keys: Sequence[str] = ()

    def turns(self, first: str) -> list[AssistantTurn]:
        return []

    def agent_turns(self, first: str) -> list[AgentTurn]:
        return []

    async def save(self, turns: Sequence[AssistantTurn], **values: Any) -> None: ...


@dataclass
class Episode:
    """An episode of ``job`` for ``prompt`` under the versions ``refs`` of its policies (None: the base model), which
    the caller keeps available; with another ``in_flight`` than ``finish``, each reply of a policy that trains begins
    with its newest version."""

    job: JobContext
    id: str
    refs: Mapping[str, protocol.AdapterRef | None]
    prompt: bytes
    seed: int
    environment_seed: int
    in_flight: InFlight = "finish"
    record: StoredEpisode | PassingEpisode = field(default_factory=PassingEpisode)
    splits: int = 0
    """Times that the chat template did not extend the sequence."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _host: EnvironmentHost | None = None
    _agent: AgentCalls | None = None
    _session: AgentSession | None = None
    _calls: list[TracedCall] = field(default_factory=list)
    """Its requests and the calls of its environment, where they are traced."""

    def __post_init__(self) -> None:
        self.turns: list[Any] = self.record.turns(self.job.first.name)
        self._instance = self.record.host
        """The host instance that ran the turns."""
        self._keys = [*self.record.keys]
        """Hashes of the keys of the agent that drives it."""

    async def run(self) -> EpisodeResult:
        """Play to the end, and send the trace where a collector is set. Raises :class:`EpisodeFailed`,
        :class:`GenerationFailed`, or :class:`~rookery.errors.Unavailable` without a host or a worker. A cancelled
        episode has no trace yet, and keeps the calls that its agent gave up: it takes them up later."""
        try:
            result = await self._traced()
        except (EpisodeFailed, GenerationFailed):
            self._forget_calls()
            raise
        self._forget_calls()
        return result

    def _forget_calls(self) -> None:
        if self._agent is not None:
            self._agent.forget()

    async def _traced(self) -> EpisodeResult:
        tracer, clock = self.job.controller.records.tracer, self.job.controller.clock
        if tracer is None:
            return await self._run()
        began, row = clock.time(), self.job.row
        about: dict[str, Any] = {
            "rookery.episode": self.id, "rookery.job": row.id, "rookery.job_name": row.name,
            "rookery.tenant": row.tenant,
        }  # fmt: skip
        try:
            result = await self._run()
        except Exception as error:
            tracer.episode(self.id, began, clock.time(), about, self._calls, str(error) or type(error).__name__)
            raise
        about |= {"rookery.reward": result.reward, "rookery.finish": result.finish, "rookery.turns": len(self.turns)}
        tracer.episode(self.id, began, clock.time(), about, self._calls, "")
        return result

    async def _run(self) -> EpisodeResult:
        environment, hosts = self.job.environment, self.job.controller.rooms.hosts
        if environment.spec.id == AGENT:
            return await self._attend(None)
        for _ in range(REPLAY_LIMIT):
            if self._instance and (self.turns or self._keys):
                host = await hosts.holder(environment, self._instance)
                if host.hello.instance != self._instance:
                    if self.turns and not host.deterministic(environment.name):
                        raise EpisodeFailed("its environment host is gone, and the environment is not deterministic")
                    self._keys = []
            else:
                host = await hosts.host_for(environment)
            self._instance, self._host = host.hello.instance, host
            if not self.record.resumes:
                hosts.close_episode(host, self.id)  # of an earlier attempt, whose replies are unknown
            try:
                return await (self._attend(host) if host.runs_agent(environment.name) else self._play(host))
            except HostLost as lost:
                if self.turns and not lost.deterministic:
                    raise EpisodeFailed(f"{lost}, and the environment is not deterministic") from None
                self.close()
                self._instance, self._keys = "", []
            except EnvironmentFailed as error:
                raise EpisodeFailed(str(error)) from None
        raise EpisodeFailed(f"its environment host was lost {REPLAY_LIMIT} times")

    def end(self, error: str = "") -> None:
        """Its end is stored, with ``error`` as a failure: answer the agent's process that waits for it, and close the
        environment."""
        if self._session is not None:
            self._session.store(error)
        self.close()

    def close(self) -> None:
        """Close the environment, which may be reset in another host."""
        if self._host is not None:
            self.job.controller.rooms.hosts.close_episode(self._host, self.id)
            self._host = None

    def leave(self) -> None:
        """It does not run any more, whether its end was stored or not."""
        if self._session is not None:
            self._session.advance("left")

    async def _attend(self, host: EnvironmentHost | None) -> EpisodeResult:
        """Let an agent drive: one in ``host``, or in the process that opens the episode. What the same agent sampled
        before stays."""
        job, agents = self.job, self.job.controller.rooms.hosts.agents
        turns = self.record.agent_turns(job.first.name) if self._agent is None else self._agent.tree.turns
        if not self._keys:  # it begins, or another process repeats its calls
            turns = [msgspec.structs.replace(turn, delivered=False) for turn in turns]
        calls = AgentCalls(job, self.id, self.seed, turns, self.sample, self._save)
        self._agent, self.turns = calls, calls.tree.turns
        session = self._session = AgentSession(
            self.id, job.row.id, job.row.tenant, self.record.split, self.prompt,
            self.environment_seed, list(job.policies), calls, self._store_keys, job.controller.clock, self._keys,
            hosted=host is not None,
        )  # fmt: skip
        calls.session = session
        began = job.controller.clock.monotonic()
        with agents.present(session), job.progress.waiting_for("environment"):
            if host is None:
                await self._watch(session, lambda: False)
            else:
                await self._observe_agent(host, session)
        called = self.seconds["queue"] + self.seconds["generation"]
        self.seconds["environment"] = max(0.0, job.controller.clock.monotonic() - began - called)
        result = session.result
        assert result is not None
        if isinstance(result, str):
            raise EpisodeFailed(f"its agent failed: {result}")
        self._check_rewards([result.reward, *(result.reward + more for more in result.rewards.values())], "")
        try:
            made = calls.result(result, self.seconds)
        except ValueError as error:
            raise EpisodeFailed(str(error)) from None
        self.splits = len(made.trajectories) - 1
        return made

    async def _watch(self, session: AgentSession, away: Callable[[], bool]) -> None:
        """Return when the agent has ended its session."""
        spec = self.job.spec.environment
        try:
            await self.job.controller.rooms.hosts.agents.attend(session, spec.step_timeout, spec.return_timeout, away)
        except AgentFailed as error:
            raise EpisodeFailed(str(error)) from None

    async def _observe_agent(self, host: EnvironmentHost, session: AgentSession) -> None:
        """Run the agent in its host, until it ends the session there. Raises :class:`EnvironmentFailed` for an
        exception of its, :class:`HostLost`."""
        job, rooms = self.job, self.job.controller.rooms
        reset = job.environment.reset(self.id, self.prompt, self.environment_seed)
        reset.agent_key = await rooms.hosts.agents.give(session)
        reset.policies = list(job.policies)
        observing = rooms.hosts.observe(host, job.environment, reset, limited=False)
        async with first_of(observing, self._watch(session, lambda: not host.connected)) as (observed, watching):
            if not observed.done():
                watching.result()
                raise EpisodeFailed("its agent ended twice")
            found = observed.result()
        session.end(AgentOutcome(found.reward, found.metrics, found.rewards))

    async def _store_keys(self, keys: str) -> None:
        self._keys = keys.split()
        await self.record.save(self.turns, host_instance=self._instance, agent_keys=keys)

    def _check_rewards(self, totals: Sequence[float], where: str) -> None:
        """Raises :class:`EpisodeFailed` for a reward that no gradient can be computed of."""
        for total in totals:
            if not math.isfinite(total):
                raise EpisodeFailed(
                    f"the reward of {self.job.environment.name}{where} is {total}, expected a finite number"
                )
            if abs(total) > LARGEST_REWARD:
                raise EpisodeFailed(
                    f"the rewards of {self.job.environment.name} add up to {total:g}{where}, allowed:"
                    f" ±{LARGEST_REWARD:g}"
                )

    async def _play(self, host: EnvironmentHost) -> EpisodeResult:
        job, self.splits = self.job, 0
        observation = await self._observe(host, job.environment.reset(self.id, self.prompt, self.environment_seed))
        played = _Played(list(observation.messages))
        speaker = self._policy(observation.policy or job.first.name, 0)
        for turn in range(job.spec.environment.max_turns):
            if given := observation.tokens:
                sequence = await self._continue(played, given, speaker, turn)
            else:
                sequence = await self._extend(played, speaker, turn)
            if sequence is None:
                played.finish = "context"
                break
            reply = self.turns[turn] if turn < len(self.turns) else await self._sample(sequence.tokens, turn, speaker)
            played.add_reply(sequence, reply, speaker.name)
            observation = await self._step(host, played, turn, sequence, speaker, given=bool(given))
            speaker = self._policy(observation.policy or job.first.name, turn + 1)  # also where nobody replies any more
            self._add(played.earned, observation, turn)
            played.conversation += observation.messages
            if observation.done:
                played.finish = "done"
                break
            if not observation.messages and not observation.tokens:
                raise EpisodeFailed(f"the environment's step {turn} is not done and has no messages to go on with")
        if played.finish != "done":
            await self._cut(host, played, observation)
        earned, speakers = played.earned, played.speakers
        for name in earned.rewards:
            if name not in speakers:
                raise EpisodeFailed(
                    f"{job.environment.name} rewards the policy {name!r}, which has no reply in the episode; reward"
                    f" those that replied: {', '.join(dict.fromkeys(speakers))}"
                )
        replies = [reply.text for reply in self.turns]
        trajectories = [sequence.tokens for sequence in played.sequences]
        return EpisodeResult(
            trajectories, played.conversation, replies, earned.reward, earned.metrics, played.finish,
            dict(self.seconds), played.steps, earned.rewards, speakers,
        )  # fmt: skip

    async def _step(
        self, host: EnvironmentHost, played: _Played, turn: int, sequence: _Sequence, speaker: JobPolicy, *,
        given: bool,
    ) -> protocol.Observation:  # fmt: skip
        """The environment's answer to the last reply of ``sequence``. ``given``: the environment gave the tokens before
        the reply."""
        reply = sequence.reply
        raw, special = await read_tokens(self.job.controller.threads, speaker.chat.decode_special, reply.tokens)
        if not given and (mark := opened_thought(speaker.chat.prompt_end)):
            raw, special = mark + (raw or reply.text), list(dict.fromkeys([*special, mark]))
        step = protocol.StepEpisode(
            call="", episode=self.id, turn=turn, text=reply.text, tokens=reply.tokens, messages=played.conversation,
            raw=raw, special=special, logprobs=reply.logprobs if given else [], finish=reply.finish,
        )  # fmt: skip
        before = self.seconds["environment"]
        observation = await self._observe(host, step)
        played.steps.append(
            TurnRecord(
                observation.reward, dict(observation.metrics), reply.finish, len(reply.tokens), reply.queue_seconds,
                reply.generation_seconds, self.seconds["environment"] - before, reply.workers,
                speaker.name, dict(observation.rewards), message=sequence.messages - 1,
            )
        )  # fmt: skip
        return observation

    async def _cut(self, host: EnvironmentHost, played: _Played, last: protocol.Observation) -> None:
        """The episode ends after the ``last`` observation, before its environment is done."""
        if last.policy and last.policy == self.job.spec.environment.judge:
            played.earned.metrics["unjudged"] = 1.0  # the judge was asked, and has no room or no turn for its answer
        if last.scores_when_cut:
            await self._score(host, played)

    def _add(self, earned: _Earned, observed: protocol.Observation, turn: int) -> None:
        """Add the rewards and metrics of a step. Raises :class:`EpisodeFailed`."""
        self._check_rewards([observed.reward, *observed.rewards.values()], f" in turn {turn}")
        earned.reward += observed.reward
        for name, value in observed.rewards.items():
            earned.rewards[self._policy(name, turn).name] = earned.rewards.get(name, 0.0) + value
        totals = [earned.reward, *(earned.reward + of_policy for of_policy in earned.rewards.values())]
        self._check_rewards(totals, f" in turn {turn}")
        earned.metrics.update(observed.metrics)
        if problem := metrics_problem(earned.metrics):
            raise EpisodeFailed(f"the environment {problem}")

    async def _score(self, host: EnvironmentHost, played: _Played) -> None:
        """Ask the environment for the rewards of an episode that ends before its end. They count in the last step."""
        before, turn, last = self.seconds["environment"], len(played.steps), played.steps[-1]
        cut = protocol.StepEpisode(
            call="", episode=self.id, turn=turn, text="", tokens=[], messages=played.conversation, finish=played.finish
        )
        observed = await self._observe(host, cut)
        self._add(played.earned, observed, turn)
        last.reward += observed.reward
        last.metrics.update(observed.metrics)
        for name, value in observed.rewards.items():
            last.rewards[name] = last.rewards.get(name, 0.0) + value
        last.environment_seconds += self.seconds["environment"] - before

    def _policy(self, name: str, turn: int) -> JobPolicy:
        """The policy of the job that the environment names."""
        policy = self.job.policies.get(name)
        if policy is None:
            raise EpisodeFailed(self.job.environment.unknown_policy(name, turn, self.job.policies))
        return policy

    async def _extend(self, played: _Played, speaker: JobPolicy, turn: int) -> _Sequence | None:
        """Extend the token sequence of the speaker's base model to where its reply begins, or begin one, with all that
        the conversation has in addition. Between base models the conversation passes as text. None when the context has
        no room for a reply."""
        chat = speaker.chat
        messages = chat.without_marks([msgspec.structs.asdict(message) for message in played.conversation])
        last = next((one for one in reversed(played.sequences) if one.model == speaker.model), None)
        threads = self.job.controller.threads
        try:
            tokens = None
            if last is not None:
                reply, end = last.reply, last.messages
                tokens = await tokenized(
                    threads, chat, messages, chat.extend, last.tokens.sequence, messages[: end - 1], reply.text,
                    reply.tokens, messages[end:],
                )  # fmt: skip
            extends = tokens is not None
            if tokens is None:
                tokens = await tokenized(threads, chat, messages, chat.prompt, messages)
        except PromptTooLong as error:
            if turn == 0:
                raise EpisodeFailed(str(error)) from None
            return None
        except RookeryError as error:
            raise EpisodeFailed(str(error)) from None
        if len(tokens) >= chat.context:
            if turn == 0:
                raise EpisodeFailed(
                    f"the prompt has {count_of(len(tokens), 'token')}, the model's context is {chat.context}"
                )
            return None
        if last is not None and extends:
            last.tokens.append_observation(tokens[len(last.tokens.sequence) :])
            return last
        self.splits += last is not None
        played.sequences.append(_Sequence(speaker.model, Trajectory(prompt=tokens)))
        return played.sequences[-1]

    async def _continue(self, played: _Played, tokens: list[int], speaker: JobPolicy, turn: int) -> _Sequence | None:
        """The sequence of the speaker's base model that is the beginning of the environment's ``tokens``, extended to
        them, or a new one; the text of the tokens joins the conversation. None when the context has no room for a
        reply."""
        chat, threads = speaker.chat, self.job.controller.threads

        def first_unknown(tokens: Sequence[int]) -> int | None:
            return next((token for token in tokens if not chat.token_bytes.known(token)), None)

        for other in played.sequences:
            if other.model != speaker.model and tokens[: len(other.tokens.sequence)] == other.tokens.sequence:
                await self._same_vocabulary(other.model, speaker)
        unknown = await read_tokens(threads, first_unknown, tokens)
        if unknown is not None:
            raise EpisodeFailed(
                f"{self.job.environment.name} gave the token id {unknown}, which the model does not have"
            )
        if len(tokens) >= chat.context:
            if turn == 0:
                raise EpisodeFailed(
                    f"the prompt has {count_of(len(tokens), 'token')}, the model's context is {chat.context}"
                )
            return None
        of_model = [one for one in played.sequences if one.model == speaker.model]
        begun = [one for one in of_model if tokens[: len(one.tokens.sequence)] == one.tokens.sequence]
        found = max(begun, key=lambda one: len(one.tokens.sequence), default=None)
        if found is None:
            added = tokens
            self.splits += bool(of_model)
            found = _Sequence(speaker.model, Trajectory(prompt=tokens))
            played.sequences.append(found)
        else:
            added = tokens[len(found.tokens.sequence) :]
            found.tokens.append_observation(added)
        text = await read_tokens(threads, chat.decode, added)
        played.conversation.append(protocol.ChatMessage(role="user", content=text))
        return found

    async def _same_vocabulary(self, model: str, speaker: JobPolicy) -> None:
        """Raises :class:`EpisodeFailed` where the speaker's model reads token ids of ``model`` as another text."""
        theirs = next(policy.chat for policy in self.job.policies.values() if policy.model == model)
        if await self.job.controller.threads(lambda: theirs.vocabulary != speaker.chat.vocabulary):
            raise EpisodeFailed(
                f"{self.job.environment.name} gave tokens of {model} to {speaker.name}, whose base model"
                f" {speaker.model} has others; give messages: between models a conversation passes as text"
            )

    def _version(self, policy: JobPolicy) -> AbstractContextManager[protocol.AdapterRef | None]:
        """The version that the policy's next reply begins with; it stays available within."""
        if self.in_flight == "finish" or not policy.about.train:
            return nullcontext(self.refs[policy.name])
        assert policy.versions is not None and policy.newest is not None
        return policy.versions.using(policy.newest.version)

    async def sample(
        self,
        policy: JobPolicy,
        generate: protocol.Generate,
        *,
        continues: bool,
        on_tokens: Callable[[SamplingResult], None] | None = None,
    ) -> tuple[AssistantTurn, SamplingResult]:
        """One reply of ``policy``: with the version, the group and the queue of this episode. ``continues`` as in
        :class:`SamplingRequest`."""
        job, chat, clock = self.job, policy.chat, self.job.controller.clock
        began = clock.monotonic()
        with job.progress.waiting_for("engine"), self._version(policy) as ref:
            generate = msgspec.structs.replace(
                generate,
                adapter=ref,
                group=self.record.group,
                in_flight=self.in_flight if policy.about.train else "finish",  # a follower is no later version
            )
            owner, waits = (job.row.tenant, job.row.id), not policy.spec.algorithm.overlaps
            request = SamplingRequest(*owner, policy.model, generate, continues, synchronous=waits)
            result = await job.controller.rooms.rollouts.sample(request, on_tokens)
        generation_seconds = max(0.0, clock.monotonic() - began - result.queue_seconds)
        self.seconds["queue"] += result.queue_seconds
        self.seconds["generation"] += generation_seconds
        text = await read_tokens(job.controller.threads, chat.decode, result.tokens)
        reply = AssistantTurn(
            result.tokens, result.logprobs, result.versions, finish=result.finish, text=text,
            workers=result.workers, queue_seconds=result.queue_seconds, generation_seconds=generation_seconds,
            policy=policy.name,
        )  # fmt: skip
        if job.controller.records.tracer is not None:
            self._trace_request(reply, policy, generate)
        return reply, result

    async def _sample(self, trajectory: Trajectory, turn: int, policy: JobPolicy) -> AssistantTurn:
        sequence, chat, sampling = trajectory.sequence, policy.chat, policy.spec.sampling
        first = policy is self.job.first
        generate = protocol.Generate(
            request=f"{self.id}.{turn}",
            adapter=None,
            prompt=sequence,
            shared_prefix=len(trajectory.prompt),
            max_tokens=min(sampling.max_tokens, chat.context - len(sequence)),
            temperature=sampling.temperature,
            seed=derive_seed(self.seed, turn),
            stop_tokens=chat.ends(sampling.stop),
            stop=sampling.stop,
            episode=self.id if first else f"{self.id}.{policy.name}",  # each keeps a separate cache
        )
        reply, _ = await self.sample(policy, generate, continues=turn > 0)
        self.turns.append(reply)
        self.job.progress.add_sampled(len(reply.tokens))
        await self._save()
        return reply

    def _trace_request(self, reply: AssistantTurn, policy: JobPolicy, generate: protocol.Generate) -> None:
        end = self.job.controller.clock.time()
        given = end - reply.generation_seconds
        start = given - reply.queue_seconds
        worked = [
            TracedCall("queue", start, given),
            TracedCall("generation", given, end, {"rookery.workers": [name for _, name in reply.workers]}),
        ]
        about = {
            "gen_ai.operation.name": "chat", "gen_ai.request.model": policy.model,
            "gen_ai.request.max_tokens": generate.max_tokens, "gen_ai.request.temperature": generate.temperature,
            "gen_ai.usage.input_tokens": len(generate.prompt), "gen_ai.usage.output_tokens": len(reply.tokens),
            "gen_ai.response.finish_reasons": [reply.finish], "rookery.request": generate.request,
            "rookery.policy": policy.name, "rookery.versions": sorted(set(reply.versions)),
        }  # fmt: skip
        self._calls.append(TracedCall("request", start, end, about, worked))

    async def _save(self) -> None:
        """Make the replies durable, and the version of the first one."""
        first, ref = self.job.first.name, self.refs[self.job.first.name]
        of_first = (version for turn in self.turns if turn.policy == first for version in turn.versions)
        version = next(of_first, ref.version if ref is not None else 0)
        await self.record.save(self.turns, version=version, host_instance=self._instance)

    async def _observe(
        self, host: EnvironmentHost, message: protocol.Reset | protocol.StepEpisode
    ) -> protocol.Observation:
        controller = self.job.controller
        began = controller.clock.monotonic()
        try:
            with self.job.progress.waiting_for("environment"):
                return await controller.rooms.hosts.observe(host, self.job.environment, message)
        finally:
            now, seconds = controller.clock.time(), controller.clock.monotonic() - began
            self.seconds["environment"] += seconds
            call = "reset" if isinstance(message, protocol.Reset) else f"step {message.turn}"
            owner, text = (self.job.row.tenant, self.job.row.id), f"{self.id}: {call}"
            if controller.records.tracer is not None:
                about = {"rookery.environment": self.job.environment.name}
                self._calls.append(TracedCall(f"environment {call}", now - seconds, now, about))
            controller.records.spans.add(TraceSpan("environment", now - seconds, now, "", *owner, text=text))
