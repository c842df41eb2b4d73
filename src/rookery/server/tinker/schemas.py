"""Bodies of the Tinker API's JSON requests. An unknown field is accepted only if it is empty."""

from __future__ import annotations

from json import JSONDecodeError
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rookery.errors import UserError
from rookery.server.bodies import off_loop, read_json
from rookery.spec.job import Temperature
from rookery.spec.parsing import MAX_PROBLEMS

T = TypeVar("T", bound="TinkerRequest")


class TinkerRequest(BaseModel):
    """Base: an unknown field with a value is refused, since ignoring it could change the request's meaning."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _ignore_empty(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key in cls.model_fields or key == "type" or value}

    type: str = ""


async def read(kind: type[T], request: Request) -> T:
    """The request's body. Raises :class:`UserError` with one line, or :class:`BodyRefused`."""
    try:
        data = await read_json(request)
        size = len(await request.body())
        return await off_loop(request.app.state.context.parsing, size, lambda: kind.model_validate(data))
    except JSONDecodeError as error:
        raise UserError(f"body: {error.msg}") from None
    except ValidationError as error:
        if error.error_count() > MAX_PROBLEMS:
            raise UserError(f"body: {error.error_count()} fields are wrong") from None
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "body"
        problem = "is not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        if field.endswith("record_stability_info"):
            problem += "; only stable_reinforce, which is not published, uses it: train with ppo, cispo or gspo"
        raise UserError(f"{field}: {problem}") from None


class ClientConfig(TinkerRequest):
    sdk_version: str = ""


class CreateSession(TinkerRequest):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeat(TinkerRequest):
    session_id: str


class FinishSession(TinkerRequest):
    reason: dict[str, Any] = {}
    detail: str | None = None


class LoraConfig(TinkerRequest):
    rank: int
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "adamw"


class CreateModelRequest(TinkerRequest):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class GetInfo(TinkerRequest):
    model_id: str


class ModelRequest(TinkerRequest):
    """Base of the operations on a model."""

    model_id: str
    seq_id: int | None = Field(None, ge=1)


class AdamParams(TinkerRequest):
    learning_rate: float = Field(0.0001, ge=0, allow_inf_nan=False)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStepRequest(ModelRequest):
    adam_params: dict[str, Any] | None = None
    optimizer_params: OptimizerConfig | None = None


class SaveWeights(ModelRequest):
    path: str | None = None
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsExternal(ModelRequest):
    path: str
    ttl_seconds: float | None = None
    age_encryption_recipients: list[str] | None = None


class SaveWeightsForSampler(ModelRequest):
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: float | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(TinkerRequest):
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None


class CreateSamplingSession(TinkerRequest):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class JoinSamplingSession(TinkerRequest):
    sampling_session_id: str


class ModelInputChunk(TinkerRequest):
    tokens: list[int] | None = None


class ModelInput(TinkerRequest):
    chunks: list[ModelInputChunk]


class SamplingParams(TinkerRequest):
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Temperature = Field(1.0, allow_inf_nan=False)
    top_k: int = -1
    top_p: float = 1.0


class AsampleRequest(TinkerRequest):
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: ModelInput
    sampling_params: SamplingParams
    sampling_session_id: str | None = None
    seq_id: int | None = Field(None, ge=0)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0, le=100)
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    base_model: str | None = None
    model_path: str | None = None


class RetrieveFuture(TinkerRequest):
    request_id: str
    allow_metadata_only: bool = False


class SamplerTarget(TinkerRequest):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = Field(0, ge=0, lt=2**30)


class RetrieveFutures(TinkerRequest):
    target: SamplerTarget
    prev_cursor: int = 0
    timeout: float | None = Field(None, ge=0)
    retrieved_request_ids: list[str] = []


class WeightsInfo(TinkerRequest):
    tinker_path: str


class CheckpointTtl(TinkerRequest):
    ttl_seconds: float | None = None
