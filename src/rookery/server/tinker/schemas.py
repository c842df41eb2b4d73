"""Bodies of the Tinker API's JSON requests, and the operations that they describe.

* An unknown field is accepted only if it is empty: ignoring a value could change the request's meaning.
* A request that cannot be executed as it was sent is refused with an error that names the field. Nothing is guessed,
  ignored or replaced by something similar.
"""

from __future__ import annotations

import re
from json import JSONDecodeError
from typing import Annotated, Any, Literal, Self

from fastapi import Request
from pydantic import ConfigDict, Field, ValidationError, model_validator

from rookery import protocol
from rookery.bounds import (
    CHUNKS,
    ENTRIES,
    FLOAT32,
    FLOAT32_LEAST,
    INTEGER,
    GivenModel,
    Integer,
    Line,
    Metadata,
    Name,
    SmallJson,
    StopText,
    Token,
    mistake,
)
from rookery.controller.sessions.operations import (
    AnyOperation,
    LoadState,
    OptimStepOperation,
    Sample,
    SaveSampler,
    SaveState,
)
from rookery.errors import UserError, count_of, short
from rookery.server.bodies import BodyRefused, off_loop, read_json
from rookery.server.responses import first_problem, named_steps
from rookery.spec.parsing import MAX_PROBLEMS
from rookery.spec.policy import Temperature
from rookery.storage.models import CheckpointKind

TTL_SECONDS = (3600, 10 * 365 * 86400)
"""The shortest and the longest lifetime of a checkpoint that the protocol allows."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}")

Number = Annotated[int, Field(ge=0, lt=2**31)]
"""The number of a session's model or sampler."""

Seq = Annotated[int, Field(ge=0, lt=2**63)]
"""The number of a request; copies of a sampler count from a multiple of 10^9."""

Labels = Annotated[dict[Name, Line], Field(max_length=100)]
"""A checkpoint's metadata."""


class TinkerRequest(GivenModel):
    """Base."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: Name = ""

    @model_validator(mode="before")
    @classmethod
    def _ignore_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields or value}

    @classmethod
    async def read(cls, request: Request) -> Self:
        """The request's body. Raises as :func:`read_body` and :meth:`parse` do."""
        data, size = await read_body(request)
        return await off_loop(request.app.state.context.threads, size, lambda: cls.parse(data))

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Raises :class:`UserError` with one line."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            if error.error_count() > MAX_PROBLEMS:
                raise UserError(f"body: {count_of(error.error_count(), 'field')} are wrong") from None
            raise UserError(mistake_of(error, data)) from None


async def read_body(request: Request) -> tuple[Any, int]:
    """The JSON value that a request has, and its bytes. Raises :class:`UserError` for one that cannot be read, also
    because an object has a field twice, and :class:`BodyRefused` for one that is too large."""
    try:
        return await read_json(request), len(await request.body())
    except JSONDecodeError as error:
        raise UserError(f"body: {error.msg}") from None
    except BodyRefused as refused:
        if refused.status_code != 422:
            raise
        raise UserError(refused.detail) from None


def mistake_of(error: ValidationError, given: Any) -> str:
    """The first mistake of ``given``, in one line: the field and what is wrong with it."""
    first = first_problem(error.errors(), given)
    field = ".".join(named_steps(first["loc"], given, first["type"])) or "body"
    unknown = first["type"] == "extra_forbidden"
    problem = "is not supported by this server" if unknown else mistake(first)
    if field.endswith("record_stability_info"):
        problem += "; only stable_reinforce, which is not published, uses it: train with ppo, cispo or gspo"
    return f"{field}: {problem}"


# --- sessions ---------------------------------------------------------------------------------------------------------


class ClientConfig(TinkerRequest):
    sdk_version: Name = ""


class CreateSession(TinkerRequest):
    tags: Annotated[list[Name], Field(max_length=100)] = Field(default_factory=list)
    user_metadata: Metadata | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    display_name: Name | None = None


class SessionHeartbeat(TinkerRequest):
    session_id: Name


class FinishSession(TinkerRequest):
    reason: Metadata = Field(default_factory=dict)
    detail: Line | None = None


class WeightsInfo(TinkerRequest):
    tinker_path: Line


class CheckpointTtl(TinkerRequest):
    ttl_seconds: float | None = None


# --- training ---------------------------------------------------------------------------------------------------------


class LoraConfig(TinkerRequest):
    rank: Integer
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(GivenModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SmallJson]

    type: Name = "adamw"


class CreateModelRequest(TinkerRequest):
    session_id: Name
    model_seq_id: Number
    base_model: Line
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class GetInfo(TinkerRequest):
    model_id: Name


class Turn(TinkerRequest):
    """The model of an operation and its number there. They are read before the other fields, whose mistakes are the
    operation's result."""

    model_config = ConfigDict(extra="ignore")

    model_id: Name
    seq_id: int | None = Field(None, ge=1, lt=2**31)


class ModelRequest(Turn):
    """Base of the operations on a model."""

    model_config = ConfigDict(extra="forbid")

    def operation(self) -> AnyOperation:
        """Raises :class:`UserError` or ``ValueError``."""
        raise NotImplementedError


class AdamParams(TinkerRequest):
    learning_rate: float = Field(0.0001, ge=0, lt=FLOAT32)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=FLOAT32_LEAST, lt=FLOAT32)
    weight_decay: float = Field(0.0, ge=0, lt=FLOAT32)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStepRequest(ModelRequest):
    adam_params: Metadata | None = None
    optimizer_params: OptimizerConfig | None = None

    def operation(self) -> OptimStepOperation:
        check_optimizer(self.optimizer_params, "optimizer_params")
        given = self.adam_params or {}
        try:
            adam = AdamParams.model_validate(given)
        except ValidationError as error:
            raise UserError(f"adam_params.{mistake_of(error, given)}") from None
        return OptimStepOperation(
            adam=protocol.Adam(
                lr=adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps,
                weight_decay=adam.weight_decay, clip=adam.grad_clip_norm,
            )
        )  # fmt: skip


class SaveWeights(ModelRequest):
    path: Line | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: Labels | None = None

    def operation(self) -> SaveState:
        return save_state("weights", self.path, self.ttl_seconds, self.user_metadata, self.overwrite)


class SaveWeightsExternal(ModelRequest):
    path: Line
    ttl_seconds: float | None = None
    age_encryption_recipients: Annotated[list[Line], Field(max_length=100)] | None = None

    def operation(self) -> SaveState:
        if self.age_encryption_recipients:
            raise UserError("age_encryption_recipients: encrypted exports are not supported")
        return save_state("external_weights", self.path, self.ttl_seconds)


class SaveWeightsForSampler(ModelRequest):
    path: Line | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: float | None = None
    user_metadata: Labels | None = None

    def operation(self) -> SaveState | SaveSampler:
        if self.path is not None:
            return save_state("sampler_weights", self.path, self.ttl_seconds, self.user_metadata)
        if self.sampling_session_seq_id is None:
            raise UserError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        session = self.model_id.rpartition(":train:")[0]
        sampler = f"{session}:sample:{self.sampling_session_seq_id}"
        return SaveSampler(sampler=sampler, inflight=self.kind == "inflight")


class LoadWeights(TinkerRequest):
    """Into a model (``model_id``), or into a new one of a session."""

    model_id: Name | None = None
    seq_id: int | None = Field(None, ge=1, lt=2**31)
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: Line | None = None
    user_metadata: Metadata | None = None
    path: Line
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Line | None = None

    def operation(self) -> LoadState:
        check_optimizer(self.optimizer_config, "optimizer_config")
        of_new = ("session_id", "model_seq_id", "base_model", "user_metadata")
        given = next((name for name in of_new if getattr(self, name) is not None), "")
        if given and self.model_id is not None:
            raise UserError(f"{given}: only a new model takes it; leave it out, or leave model_id out")
        if self.weights_access_token is not None:
            raise UserError("weights_access_token: weights of other accounts cannot be read")
        return LoadState(path=self.path, optimizer=self.optimizer)


def check_optimizer(optimizer: OptimizerConfig | None, field: str) -> None:
    """Raises :class:`UserError` for an optimizer other than Adam, and for one with parameters, which nothing reads
    here."""
    if optimizer is None:
        return
    if optimizer.type != "adamw":
        raise UserError(f"optimizer {short(optimizer.type)!r} is not supported; use Adam (AdamParams)")
    if unread := next(iter(optimizer.model_extra or {}), ""):
        raise UserError(f"{field}.{short(unread)}: not read; the parameters of Adam are in each adam_params")


def check_ttl(seconds: float | None) -> float | None:
    low, high = TTL_SECONDS
    if seconds is not None and not low <= seconds <= high:
        raise UserError(f"ttl_seconds: {seconds:g} is not between {low} and {high}")
    return seconds


def save_state(
    kind: CheckpointKind,
    name: str | None,
    ttl: float | None,
    about: dict[str, str] | None = None,
    overwrite: bool = False,
) -> SaveState:
    if name is None or not _NAME.fullmatch(name):
        raise UserError(
            f"path: {short(repr(name))} is no name; letters, digits, dot, dash, underscore and space, at most 200"
        )
    return SaveState(kind=kind, name=name, ttl=check_ttl(ttl), overwrite=overwrite, about=about or {})


# --- sampling ---------------------------------------------------------------------------------------------------------


class CreateSamplingSession(TinkerRequest):
    session_id: Name
    sampling_session_seq_id: Number
    base_model: Line | None = None
    model_path: Line | None = None


class ModelInputChunk(TinkerRequest):
    tokens: Annotated[list[Token], Field(max_length=ENTRIES)] | None = None


class ModelInput(TinkerRequest):
    chunks: Annotated[list[ModelInputChunk], Field(max_length=CHUNKS)]


PROMPT_LOGPROBS = 4 << 20
"""Log-probabilities of one prompt, those of its likeliest tokens included: a worker keeps 8 bytes of each until they
are sent."""


class SamplingParams(TinkerRequest):
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopText | Annotated[list[StopText] | list[Token], Field(max_length=100)] | None = None
    """Texts, or tokens in place of those that end the model's replies; an empty list disables all."""
    temperature: Temperature = 1.0
    top_k: Integer = -1
    top_p: float = 1.0


class AsampleRequest(TinkerRequest):
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: ModelInput
    sampling_params: SamplingParams
    sampling_session_id: Name | None = None
    seq_id: Seq | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=100)
    topk_sample_logprobs: Integer = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1, le=INTEGER)
    base_model: Line | None = None
    model_path: Line | None = None

    def operation(self) -> Sample:
        params, last = self.sampling_params, self.prompt_logprobs_last_n
        if params.top_k > 0 or params.top_p != 1.0:
            raise UserError(
                "top_k and top_p are not supported: a trainer cannot reproduce the log-probabilities of what they cut"
                " off"
            )
        if self.topk_sample_logprobs:
            raise UserError("topk_sample_logprobs is not supported")
        if self.base_model is not None or self.model_path is not None:
            raise UserError("give the model when you create the sampling session")
        if self.sampling_session_id is None or self.seq_id is None:
            raise UserError("asample needs sampling_session_id and seq_id; create a sampling session first")
        prompt: list[int] = []
        for chunk in self.prompt.chunks:
            if chunk.tokens is None:
                raise UserError("prompt: chunks hold tokens; images and audio are not supported")
            prompt += chunk.tokens
        if not prompt:
            raise UserError("prompt: it needs at least one token")
        if last is not None and not (self.prompt_logprobs or self.topk_prompt_logprobs):
            raise UserError("prompt_logprobs_last_n: needs prompt_logprobs")
        if last is not None and last >= len(prompt):
            raise UserError(f"prompt_logprobs_last_n: the prompt has {count_of(len(prompt), 'token')}")
        scored = len(prompt) if last is None else last
        if (self.prompt_logprobs or self.topk_prompt_logprobs) and (
            scored * (1 + self.topk_prompt_logprobs) > PROMPT_LOGPROBS
        ):
            raise UserError(
                f"topk_prompt_logprobs: at most {PROMPT_LOGPROBS} log-probabilities of one prompt; ask for fewer"
                " likeliest tokens, or for those of the last tokens alone (prompt_logprobs_last_n)"
            )
        given = [params.stop] if isinstance(params.stop, str) else params.stop or []
        texts = [stop for stop in given if isinstance(stop, str)]
        tokens = [stop for stop in given if isinstance(stop, int)]
        return Sample(
            sampler=self.sampling_session_id, prompt=prompt, count=self.num_samples, max_tokens=params.max_tokens,
            temperature=params.temperature, seed=params.seed, stop=texts,
            stop_tokens=None if params.stop is None or texts else tokens,
            prompt_logprobs=self.prompt_logprobs or False, last=last, topk=self.topk_prompt_logprobs,
        )  # fmt: skip


class RetrieveFuture(TinkerRequest):
    request_id: Name
    allow_metadata_only: bool = False
