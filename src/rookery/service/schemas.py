"""The shapes of the HTTP API, as its documentation shows them.

What the controller tells (jobs, completions) is defined once, in ``controller/views``; :func:`documented` makes the
documentation's model from it. Requests are read with the models here, which refuse unknown fields.
"""

from __future__ import annotations

import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, create_model

from rookery.controller.views import JobView, Sampled


def documented(struct: type[msgspec.Struct]) -> type[BaseModel]:
    """A pydantic model with the fields of ``struct``; structs inside it become models too."""
    hints = get_type_hints(struct)
    fields: dict[str, Any] = {name: (_translated(hints[name]), ...) for name in struct.__struct_fields__}
    model: type[BaseModel] = create_model(struct.__name__, __doc__=struct.__doc__, **fields)
    return model


def _translated(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return documented(annotation)
    if get_origin(annotation) in (list, dict, types.UnionType):
        inner = tuple(_translated(argument) for argument in get_args(annotation))
        if isinstance(annotation, types.UnionType):
            union: Any = inner[0]
            for other in inner[1:]:
                union = union | other
            return union
        return get_origin(annotation)[inner]
    return annotation


Job = documented(JobView)
Jobs = types.GenericAlias(list, (Job,))
Completion = documented(Sampled)

Row = dict[str, Any]


class Asked(BaseModel):
    """Base of what is asked for: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid")


class ChatMessage(Asked):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SampleRequest(Asked):
    """``target`` is a base model's name, ``JOB`` (its newest version) or ``JOB@VERSION``."""

    target: str = Field(min_length=1)
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int = Field(256, ge=1, le=131072)
    temperature: float = Field(1.0, ge=0, le=10, description="0 takes the likeliest token each time")
    seed: int | None = Field(None, ge=0, lt=2**63, description="The same seed gives the same text; drawn when absent")
    stop: list[str] = Field(default_factory=list, max_length=16)


class DatasetAnswer(BaseModel):
    dataset: str = Field(description="SHA-256 of the bytes; jobs name it as environment.dataset")
    rows: int


class AdapterAnswer(BaseModel):
    adapter: str = Field(description="Hash of the upload; jobs name it as policies.<name>.warm_start.upload")


class NewTenant(Asked):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


class TenantAnswer(BaseModel):
    id: str
    name: str
    created: float


class NewKey(Asked):
    label: str = Field("", max_length=100)


class KeyAnswer(BaseModel):
    key: str = Field(description="Shown once; the service keeps only its hash")
    tenant: str
    label: str


class DryRun(BaseModel):
    """What a job would be: every default filled in, and three of its prompts as the policy would read them."""

    model_config = ConfigDict(extra="allow")


class Health(BaseModel):
    model_config = ConfigDict(extra="allow")
