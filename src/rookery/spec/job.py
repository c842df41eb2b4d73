"""A job: one reinforcement-learning task that trains one or more policies.

Every field, default and bound of a job is defined here and in :mod:`rookery.spec.policy`, and nowhere else.
``docs/job.md`` is generated from both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from rookery.bounds import EXPERIMENT, GIVEN_NAME, INTEGER, NAME, Line, Name, mistake
from rookery.errors import short
from rookery.spec import values
from rookery.spec.policy import (
    AlgorithmSpec,
    PolicySpec,
    PolicyStop,
    SamplingSpec,
    Seconds,
    SpecModel,
    StrictModel,
)

BUILTIN_TURNS = {"jsonl": 1, "reasoning-gym": 1, "calculator": 2, "xrouter": 3}
"""The most replies of an episode of each built-in environment, without tools; `openenv` has `max_turns`."""

FIRST_REPLIES = ("jsonl", "reasoning-gym", "calculator", "xrouter", "openenv", "gymnasium", "textarena")
"""Built-in environments in which the first policy of a job replies, and nobody else but the judge of `jsonl`."""

TOOL_CALLS = 4
"""Calls of tools in an episode where the job gives no number."""

ROW_ENVIRONMENTS = {"sft": "demonstrations", "dpo": "preferences"}
"""The built-in environment whose rows each algorithm trains on."""

AGENT = "agent"
"""The built-in environment whose episodes are driven by the processes that open them."""

FILE_ENVIRONMENTS = ("jsonl", AGENT, *ROW_ENVIRONMENTS.values())
"""Built-in environments whose options name files of rows."""


BUILTIN = "builtin:"
"""Beginning of the names under which the service's hosts offer the built-in environments."""


def check_hosted_name(name: object) -> None:
    """Raises ValueError for a name under which no host of a user can offer an environment."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"given {values.escaped(name)}, allowed: a text that is not empty")
    if len(name) > NAME:
        raise ValueError(f"given {values.escaped(name)}, allowed: at most {NAME} characters")
    if half := values.half_of(name):
        raise ValueError(f"given {values.escaped(name)}, {half}")
    if name.startswith(BUILTIN):
        raise ValueError(
            f"given {values.escaped(name)}, which is the service's; a built-in is"
            f" {{id: {values.escaped(name.removeprefix(BUILTIN))[1:-1]}}}, yours has another name"
        )


class EnvironmentSpec(SpecModel):
    """Where episodes come from. Give exactly one of ``id`` and ``hosted``. With ``id``, every other field is an
    option of that [built-in environment](#built-in-environments). With ``hosted``, the environment is an object in your
    own process and takes no options."""

    model_config = ConfigDict(extra="allow")

    id: Name | None = None
    """A built-in environment: `jsonl`, `agent`, `calculator`, `xrouter`, `reasoning-gym`, `openenv`, `verifiers`,
    `gymnasium`, `textarena`; `demonstrations` for the algorithm `sft`, `preferences` for `dpo`."""
    hosted: Name | None = None
    """A name that an environment host of yours offers. `Client.train` fills it in."""
    max_turns: int = Field(8, ge=1, le=1000)
    """An episode that has not ended after this many replies is closed with the reward it has. An agent gets no further
    reply."""
    step_timeout: Seconds = 60.0
    """Time limit of `prompts`, `reset` and `step`, and of an agent's time between two calls. A late `reset`, `step` or
    call fails its episode; late `prompts` pause the job."""
    return_timeout: Seconds = 60.0
    """Time to wait for an environment host that is away, before its episodes fail or, if no host is left, the job
    pauses; of `agent`, for a process that opens episodes."""

    @model_validator(mode="after")
    def _one_source(self) -> EnvironmentSpec:
        if (self.id is None) == (self.hosted is None):
            raise ValueError("exactly one of id (a built-in) and hosted (your own process)")
        if self.hosted is not None:
            try:
                check_hosted_name(self.hosted)
            except ValueError as error:
                raise ValueError(f"hosted: {error}") from None
        return self

    @property
    def name(self) -> str:
        """The name under which hosts offer it."""
        return self.hosted if self.hosted is not None else f"{BUILTIN}{self.id}"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @property
    def turns(self) -> int:
        """The most replies of an episode."""
        return min(self.max_turns, self.longest)

    def turns_of(self, policy: str) -> int:
        """The most replies of one policy of the job in an episode: a verifier's policy judges once, and no other."""
        if self.judge is None:
            return self.turns
        return 1 if policy == self.judge else min(self.max_turns, self.longest - 1)

    @property
    def longest(self) -> int:
        """The most replies of an episode that `max_turns` does not end."""
        return BUILTIN_TURNS.get(self.id or "", self.max_turns) + (self.judge is not None) + self.tool_calls

    @property
    def tool_calls(self) -> int:
        """The most calls of tools in an episode of `jsonl`."""
        calls = self.options.get("calls", TOOL_CALLS)
        return calls if self.id == "jsonl" and self.options.get("tools") and isinstance(calls, int) else 0

    @property
    def judge(self) -> str | None:
        """The policy that judges replies as the verifier of `jsonl`."""
        verifier = self.options.get("verifier")
        if self.id != "jsonl" or not isinstance(verifier, dict) or verifier.get("name") != "judge":
            return None
        if verifier.get("policy") is None:
            return None  # a model outside of the job, or a mistake that the verifier's own check names
        return str(verifier.get("policy"))


class EvaluationSpec(StrictModel):
    """Held-out prompts, with the job's own sampling. With ``prompts`` above 0 the first and the last version are always
    evaluated. Prompts are fixed at the first evaluation, so every version answers the same ones with the same noise."""

    every: int = Field(0, ge=0, le=INTEGER)
    """Optimizer steps between evaluations; 0 leaves the first and the last. Only steps that became a version can be
    evaluated."""
    prompts: int = Field(0, ge=0, le=100_000)
    """Number of prompts of the eval split; 0 is no evaluation."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Draws the sampling noise of the evaluation."""


class CheckpointSpec(StrictModel):
    """Which versions are written and kept."""

    keep_last: int = Field(3, ge=1, le=INTEGER)
    """Versions whose adapter is kept. Older ones stay in the history without their bytes."""
    keep_best: bool = True
    """Also keep the version with the best evaluation, of those of which half of the episodes completed, or, without
    evaluations, the one from which the training step with the best mean reward was taken."""
    commit_every: int = Field(1, ge=1, le=INTEGER)
    """Optimizer steps per durable version, at most `max_staleness` + 1 where replies are sampled. A crash loses at
    most this many steps less one; rollouts see a version only when it is durable."""


class StopSpec(StrictModel):
    """The job ends at whichever comes first; give at least one."""

    steps: int | None = Field(None, ge=1, le=INTEGER)
    """Optimizer steps."""
    epochs: float | None = Field(None, gt=0, le=1e6)
    """Times that each training prompt or row is taken, for an environment that knows how many it has. The service puts
    the optimizer steps that this takes, rounded up, in `steps`, unless those are fewer; for a policy with a different
    `groups_per_step`, in its own `stop`."""
    reward: float | None = None
    """Mean reward of a training step at or above this."""
    wall_time: Seconds | None = None
    """Time that the job has run, over restarts; paused time does not count."""
    tokens: int | None = Field(None, ge=1, le=INTEGER)
    """Sampled tokens, those of evaluations included."""

    @model_validator(mode="after")
    def _something(self) -> StopSpec:
        if all(getattr(self, name) is None for name in ("steps", "epochs", "reward", "wall_time", "tokens")):
            raise ValueError("at least one of steps, epochs, reward, wall_time, tokens")
        return self


class SinkSpec(StrictModel):
    """A server to which the job's metrics, evaluations, settings and state are also written. Give exactly one of
    ``url`` and ``server``. A job never waits for its sinks; the stored metrics are sent when the server answers."""

    kind: Literal["mlflow", "trackio", "wandb"] = "mlflow"
    """The protocol: MLflow's REST API, the API of trackio's servers and Spaces, or that of Weights & Biases."""
    url: Line | None = None
    """Address of the server, such as `https://api.wandb.ai`. A private one must be allowed by the administrator."""
    secret: Name | None = None
    """The name of a secret of yours (`rookery secrets set`), which the service gives the server at ``url``: a key or
    token; for MLflow also `USER:PASSWORD`. The address then has https://, unless the administrator allows the host. A
    secret that is replaced or deleted is used no more."""
    server: Name | None = None
    """A server that the administrator named in `ROOKERY_SINKS`, with its credentials."""
    experiment: str = Field("rookery", pattern=EXPERIMENT, max_length=200)
    """The experiment (MLflow) or project (trackio, Weights & Biases) in which the job is a run; it is created where it
    does not exist."""
    entity: Name | None = None
    """The team at Weights & Biases; by default that of the key."""
    traces: int | None = Field(None, ge=0, le=64)
    """Episodes of each step that trackio gets as traces; by default 4."""

    @model_validator(mode="after")
    def _one_target(self) -> SinkSpec:
        if (self.url is None) == (self.server is None):
            raise ValueError("exactly one of url (an address) and server (a name of ROOKERY_SINKS)")
        if self.secret is not None and self.server is not None:
            raise ValueError("secret belongs to url; a server of ROOKERY_SINKS has credentials of its own")
        if self.entity is not None and self.kind != "wandb":
            raise ValueError("entity belongs to the kind wandb; leave it out")
        if self.traces is not None and self.kind != "trackio":
            raise ValueError("traces belongs to the kind trackio; leave it out")
        if self.kind == "wandb" and re.search(r"[/\\#?%:]", self.experiment):
            raise ValueError("experiment: the name of a project at Weights & Biases has no /")
        if self.kind == "trackio" and "/" in self.experiment:
            raise ValueError("experiment: the name of a project at trackio has no /")
        return self


class JobSpec(StrictModel):
    """One RL task that trains one or more policies."""

    name: str = Field(pattern=GIVEN_NAME, max_length=100)
    """Name of the job: 1 to 100 letters, digits, `.`, `_`, `-`. Where several jobs share a name, it means the newest,
    and `NAME~1` the one before it."""
    base_model: Line = Field(min_length=1)
    """Model that the adapter is trained on: a catalogue name (`rookery models`), a hub id, or a folder written as a
    path (`./x`, `/x`), which only the administrator may name."""
    environment: EnvironmentSpec
    """Where episodes come from: [environment](#environment)."""
    policies: dict[Name, PolicySpec] = Field(
        default_factory=lambda: {"main": PolicySpec()}, min_length=1, max_length=16
    )
    """The policies that reply in an episode, by name: [policies](#policies)."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """How rewards become gradients: [algorithm](#algorithm)."""
    sampling: SamplingSpec = SamplingSpec()
    """How replies are sampled: [sampling](#sampling)."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out prompts: [evaluation](#evaluation)."""
    checkpoints: CheckpointSpec = CheckpointSpec()
    """Which versions are written and kept: [checkpoints](#checkpoints)."""
    stop: StopSpec
    """When the job ends: [stop](#stop)."""
    sinks: list[SinkSpec] = Field(default_factory=list, max_length=4)
    """Servers to which metrics are also written: [sinks](#sinks)."""
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, max_length=16
    )
    """Texts of yours by name; the service does not read them."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The order of prompts and the randomness of every episode follow from it."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch. An endless split is taken in its own order."""

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, value: dict[str, PolicySpec]) -> dict[str, PolicySpec]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ValueError(
                    f"policy name {short(repr(name))}: 1 to 64 letters, digits, dots, dashes, underscores, the first"
                    " one a letter or digit"
                )
        if not any(policy.train for policy in value.values()):
            raise ValueError("at least one policy with train: true")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        judge = self.environment.judge
        if judge is not None and judge not in [*self.policies][1:]:
            first = "the first policy, which gives the reply"
            given = first if judge in self.policies else f"no policy {short(repr(judge))}"
            raise ValueError(f"environment.verifier.policy: {given}; give one of the others under policies")
        for name, policy in self.policies.items():
            if policy.follows is not None and policy.follows.policy not in self.trained:
                raise ValueError(
                    f"policies.{name}.follows.policy: given {short(repr(policy.follows.policy))}, allowed: a policy"
                    f" that trains: {', '.join(self.trained)}"
                )
        for name in self.trained:
            policy, mine = self.policies[name], self.of_policy(name)
            where = "" if policy.algorithm is None else f"policies.{name}."
            try:
                AlgorithmSpec.model_validate(mine.algorithm.model_dump())
            except ValidationError as error:
                problem = mistake(error.errors()[0])
                raise ValueError(f"policies.{name}.algorithm: {problem}") from None
            episodes = mine.algorithm.group_size * mine.algorithm.groups_per_step
            if mine.algorithm.micro_batch > episodes:
                raise ValueError(
                    f"{where}algorithm.micro_batch: given {mine.algorithm.micro_batch}, allowed: at most group_size x"
                    f" groups_per_step = {episodes}"
                )
            if mine.checkpoints.commit_every > mine.algorithm.max_staleness + 1 and not mine.algorithm.on_rows:
                raise ValueError(
                    f"checkpoints.commit_every: given {self.checkpoints.commit_every}, allowed at most"
                    f" {where}algorithm.max_staleness + 1 = {mine.algorithm.max_staleness + 1}"
                )
            if policy.full and mine.algorithm.kl_weight:
                raise ValueError(
                    f"{where}algorithm.kl_weight: not with policies.{name}.full, which keeps no base model"
                )
            schedule = policy.optimizer.schedule
            ends = (schedule.total_steps, mine.stop.steps, mine.stop.epochs)
            if schedule.name in ("linear", "cosine", "uba") and all(end is None for end in ends):
                raise ValueError(
                    f"policies.{name}.optimizer.schedule: {schedule.name} needs total_steps, or stop.steps"
                )
        self._rows_fit()
        return self

    def _rows_fit(self) -> None:
        """Raises ValueError where the algorithm and the environment, or fields of a job on rows, do not belong
        together."""
        algorithm, given = self.algorithm.name, self.environment.id
        wanted = ROW_ENVIRONMENTS.get(algorithm)
        if wanted is None:
            for other, environment in ROW_ENVIRONMENTS.items():
                if given == environment:
                    raise ValueError(f"algorithm.name: given {algorithm}, the environment {given} needs {other}")
            return
        if given != wanted:
            shown = given or f"hosted: {self.environment.hosted}"
            raise ValueError(f"environment: given {shown}, the algorithm {algorithm} needs {{id: {wanted}, …}}")
        if self.several_policies:
            raise ValueError(f"policies: {algorithm} trains one policy; leave the others out")
        name, policy = self.policy
        if policy.algorithm is not None or policy.sampling is not None:
            raise ValueError(f"policies.{name}: algorithm and sampling have no effect with {algorithm}; leave them out")
        if algorithm == "dpo" and (policy.full or policy.trainers > 1):
            why = "full, which keeps no model to compare with" if policy.full else "trainers above 1: pairs stay whole"
            raise ValueError(f"policies.{name}: with dpo, not {why}")
        if self.sampling != SamplingSpec():
            raise ValueError(f"sampling: {algorithm} samples nothing; leave it out")
        for field in ("reward", "tokens"):
            if getattr(self.stop, field) is not None:
                raise ValueError(f"stop.{field}: {algorithm} samples nothing; give steps, epochs or wall_time")

    def of_policy(self, name: str) -> JobSpec:
        """The job as one of its policies sees it: with that policy alone, its base model, algorithm, sampling and
        stop."""
        policy = self.policies[name]
        parts: dict[str, Any] = {"policies": {name: policy}, "base_model": self.base_model_of(name)}
        for part in ("algorithm", "sampling", "stop"):
            if (changes := getattr(policy, part)) is not None:
                given = {field: getattr(changes, field) for field in changes.model_fields_set}
                known = {field: value for field, value in given.items() if value is not None}
                parts[part] = getattr(self, part).model_copy(update=known)
        return self.model_copy(update=parts)

    def with_models(self, name: Callable[[str], str]) -> JobSpec:
        """The job with the base model ``name(model)`` in place of each ``model``."""
        policies = {
            policy: about.model_copy(update={"base_model": name(about.base_model)}) if about.base_model else about
            for policy, about in self.policies.items()
        }
        return self.model_copy(update={"base_model": name(self.base_model), "policies": policies})

    def with_epochs(self, prompts: int) -> JobSpec:
        """The job with ``stop.steps`` for its epochs of so many training prompts, for each policy by the groups that it
        takes per step."""
        if self.stop.epochs is None:
            return self
        total = prompts * Fraction(repr(self.stop.epochs))  # as it is written: 1.1 times 10 is 11
        steps = self._steps_within(total)
        policies = dict(self.policies)
        for name in self.trained:
            mine, given = self.of_policy(name)._steps_within(total), policies[name].stop or PolicyStop()
            if mine != steps or given.steps is not None:
                stop = given.model_copy(update={"steps": mine})
                policies[name] = policies[name].model_copy(update={"stop": stop})
        stops = self.stop.model_copy(update={"steps": steps})
        return self.model_copy(update={"stop": stops, "policies": policies})

    def _steps_within(self, prompts: Fraction) -> int:
        """The optimizer steps that take so many prompts, at most those of ``stop``."""
        size = self.algorithm.batch_size or self.algorithm.groups_per_step
        steps = max(1, math.ceil(prompts / size))
        return min(steps, self.stop.steps or steps)

    def base_model_of(self, name: str) -> str:
        """The base model of a policy; that of the policy that it follows."""
        policy = self.policies[name]
        if policy.follows is not None:
            return self.base_model_of(policy.follows.policy)
        return policy.base_model or self.base_model

    @property
    def base_models(self) -> list[str]:
        """The base models of the policies, that of the first one first."""
        return list(dict.fromkeys(self.base_model_of(name) for name in self.policies))

    @property
    def trained(self) -> list[str]:
        """The names of the policies that train."""
        return [name for name, policy in self.policies.items() if policy.train]

    @property
    def several_policies(self) -> bool:
        """Whether it has several policies: figures and lines of its log then name the one that they are about."""
        return len(self.policies) > 1

    @property
    def several_trained(self) -> bool:
        """Whether several of its policies train: groups and steps then name the ones that took them."""
        return len(self.trained) > 1

    @property
    def policy(self) -> tuple[str, PolicySpec]:
        """The first policy, the only one of :meth:`of_policy`, with its name."""
        return next(iter(self.policies.items()))

    @property
    def compares_with_start(self) -> bool:
        """Whether the KL penalty needs the weights of version 0, which the base model's alone do not give."""
        algorithm, (_, policy) = self.algorithm, self.policy
        compares = algorithm.kl_weight > 0 or algorithm.name == "dpo"
        return compares and algorithm.kl_reference == "start" and policy.warm_start is not None


def stored_policies(spec: Mapping[str, Any]) -> list[str]:
    """The names of the policies of a stored job, that of the one that begins an episode first."""
    return [*(spec.get("policies") or {"main": {}})]


def scored_policy(spec: Mapping[str, Any]) -> str:
    """The policy of a stored job whose reward is that of the job and of an episode, where it has several policies: the
    first that trains. Empty where it has one."""
    policies = spec.get("policies") or {}
    return next((name for name, about in policies.items() if about.get("train", True)), "") if len(policies) > 1 else ""


def stored_base_model(spec: Mapping[str, Any], policy: str) -> str:
    """The base model of a policy of a stored job."""
    about = spec.get("policies", {}).get(policy, {})
    if about.get("follows"):
        return stored_base_model(spec, about["follows"]["policy"])
    return str(about.get("base_model") or spec["base_model"])


def without_weights(spec: Mapping[str, Any], policy: str, job: str) -> str:
    """Why a stored job of the name ``job`` has no weights of ``policy``, in a line."""
    policies = spec.get("policies") or {"main": {}}
    about = policies.get(policy)
    if about is None:
        return f"job {job} has no policy {short(repr(policy))}; it has {', '.join(policies)}"
    if about.get("follows"):
        return f"{policy} of job {job} has no weights: it replies with versions of {about['follows']['policy']}"
    return f"{policy} of job {job} has no weights: it is the base model {stored_base_model(spec, policy)}"


def stored_base_models(spec: Mapping[str, Any]) -> set[str]:
    """The base models that a stored job needs."""
    return {stored_base_model(spec, policy) for policy in stored_policies(spec)}


def needed_models(spec: Mapping[str, Any]) -> str:
    """The base models that a stored job needs, for a line."""
    first, *others = sorted(stored_base_models(spec))
    return f"base models {', '.join([first, *others[:-1]])} and {others[-1]}" if others else f"base model {first}"
