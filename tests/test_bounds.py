"""Every text, list, mapping, number and JSON value that a stranger sends has a bound where its field is declared."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
import msgspec
import pytest
from fastapi.params import Header, Param
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rookery import protocol
from rookery.bounds import METADATA, METRIC_LETTERS, METRICS, JsonSize, is_small, metrics_problem
from rookery.environments.builtins import BUILTINS
from rookery.protocol.envhost import FromHost
from rookery.protocol.worker import FromWorker
from rookery.server.openai import OpenAIModel
from rookery.server.routes import admin, jobs, openai
from rookery.server.schemas import RequestModel
from rookery.server.tinker import calls, sessions
from rookery.server.tinker.schemas import CreateSession, OptimizerConfig, TinkerRequest
from rookery.spec.job import JobSpec
from rookery.spec.policy import SpecModel

UNBOUNDED_BY_DESIGN = {
    "EnvironmentSpec.*": "options: the model of each built-in bounds them, and quotas.job_problems their bytes",
}
"""Fields that have another bound, and which."""


def flat(metadata: Any) -> Iterator[Any]:
    """The constraints of an annotation; pydantic nests them in its own fields, msgspec in one object."""
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from flat(one.metadata)
        else:
            yield one


def has_length(constraints: list[Any]) -> bool:
    return any(getattr(one, "max_length", None) is not None for one in constraints if not isinstance(one, type)) or any(
        isinstance(one, JsonSize) for one in constraints
    )


def has_range(constraints: list[Any]) -> bool:
    def given(*names: str) -> bool:
        return any(getattr(one, name, None) is not None for one in constraints for name in names)

    return given("ge", "gt") and given("le", "lt")


def problems(annotation: Any, where: str, constraints: list[Any] | None = None) -> Iterator[str]:
    """The parts of a type without a bound."""
    constraints = constraints or []
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from problems(arguments[0], where, [*constraints, *flat(arguments[1:])])
    elif origin in (Union, types.UnionType):
        for one in arguments:
            yield from problems(one, where, constraints)
    elif origin is Literal or annotation in (bool, float, type(None)):
        return
    elif annotation in (str, bytes):
        if not has_length(constraints):
            yield f"{where}: {annotation.__name__} without a longest length"
    elif annotation is int:
        if not has_range(constraints):
            yield f"{where}: int without a range"
    elif annotation is Any or annotation in (dict, list):
        if not any(isinstance(one, JsonSize) for one in constraints):
            yield f"{where}: {annotation} without a size"
    elif origin in (list, set, frozenset, tuple, dict):
        if any(isinstance(one, JsonSize) for one in constraints):
            return  # the whole value is measured
        fixed = origin is tuple and Ellipsis not in arguments
        if not fixed and not has_length(constraints):
            yield f"{where}: {origin.__name__} without a longest length"
        for one in arguments:
            if one is not Ellipsis:
                yield from problems(one, f"{where}[]")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel | msgspec.Struct):
        yield from problems_of(annotation)
    else:
        yield f"{where}: {annotation} is a type that this test does not know"


def problems_of(model: type) -> Iterator[str]:
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            yield from problems(field.annotation, f"{model.__name__}.{name}", [*flat(field.metadata)])
        if model.model_config.get("extra") != "forbid":
            hints = get_type_hints(model, include_extras=True) if model.model_config.get("extra") == "allow" else {}
            extra = get_args(hints.get("__pydantic_extra__"))
            if not extra or extra[1] is Any:
                if model.model_config.get("extra") == "allow":
                    yield f"{model.__name__}.*: further fields without a size"
            else:
                yield from problems(extra[1], f"{model.__name__}.*")
    else:
        for name, hint in get_type_hints(model, include_extras=True).items():
            if not name.startswith("__"):
                yield from problems(hint, f"{model.__name__}.{name}")


def all_of(base: type) -> Iterator[type]:
    yield base
    for derived in base.__subclasses__():
        yield from all_of(derived)


BASES = [SpecModel, RequestModel, OpenAIModel, TinkerRequest]
SCHEMAS = [
    *(model for base in BASES for model in all_of(base) if model.__module__.startswith("rookery.")),
    *(builtin.options for builtin in BUILTINS.values()),
    OptimizerConfig,
    *get_args(FromWorker),
    *get_args(FromHost),
]


@pytest.mark.parametrize("model", SCHEMAS, ids=lambda model: model.__name__)
def test_every_field_has_a_bound(model: type) -> None:
    found = {line for line in problems_of(model) if line.partition(":")[0] not in UNBOUNDED_BY_DESIGN}
    assert found == set()


def test_an_unbounded_field_is_found() -> None:
    class Loose(BaseModel):
        text: str
        numbers: list[int]
        names: dict[str, bool]
        anything: Any
        nested: list[Annotated[list[str], annotated_types.MaxLen(3)]] | None

    class LooseStruct(msgspec.Struct):
        data: bytes
        texts: Annotated[list[str], msgspec.Meta(max_length=3)]

    assert {line.partition(":")[0] for line in problems_of(Loose)} == {
        "Loose.text", "Loose.numbers", "Loose.numbers[]", "Loose.names", "Loose.names[]", "Loose.anything",
        "Loose.nested", "Loose.nested[][]",
    }  # fmt: skip
    assert {line.partition(":")[0] for line in problems_of(LooseStruct)} == {"LooseStruct.data", "LooseStruct.texts[]"}


ROUTES = [
    route
    for router in (jobs.routes, admin.routes, openai.routes, calls.routes, sessions.routes)
    for route in router.routes
    if isinstance(route, APIRoute)
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{'/'.join(sorted(route.methods))} {route.path}")
def test_every_number_of_an_address_has_a_range(route: APIRoute) -> None:
    """Its texts are bounded with the request's head, and its body by the model."""
    found = []
    for field in (*route.dependant.query_params, *route.dependant.path_params, *route.dependant.header_params):
        assert isinstance(field.field_info, Param | Header)
        kinds = get_args(field.field_info.annotation) or (field.field_info.annotation,)
        if int in kinds and not has_range([*flat(field.field_info.metadata)]):
            found.append(field.name)
    assert found == []
    for body in route.dependant.body_params:
        kind = body.field_info.annotation
        assert kind == dict[str, Any] or kind in SCHEMAS, "a body is a bounded model, or a job"


def test_a_value_is_measured_up_to_its_bound() -> None:
    assert is_small({"a": [1, 2.5, None, True, "é"]}, 100)
    for large in ("x" * 101, ["x"] * 101, {str(n): 1 for n in range(60)}, 10**400, [[[]]] * 60, "é" * 60):
        assert not is_small(large, 100), large
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert not is_small(deep, METADATA)


@pytest.mark.parametrize(
    "fields",
    [{"user_metadata": {"a": "x" * METADATA}}, {"tags": ["x"] * 101}, {"sdk_version": "x" * 201}, {"type": "x" * 201}],
    ids=lambda fields: next(iter(fields)),
)
def test_client_metadata_is_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CreateSession.model_validate(fields)


def test_bounds_of_messages_hold_when_they_are_decoded() -> None:
    role = protocol.Observation(
        epoch=1, call="c", episode="e", messages=[protocol.ChatMessage(role="r" * 7_000_000, content="")]
    )
    names = protocol.Observation(epoch=1, call="c", episode="e", metrics={f"m{n}": 1.0 for n in range(101)})
    hello = protocol.HostHello(
        protocol=protocol.PROTOCOL, instance="i" * 201, environments=[protocol.HostedEnvironment(name="e")]
    )
    for message in (role, names, hello):
        with pytest.raises(protocol.BadFrame, match="length"):
            protocol.decode(protocol.from_host, protocol.encode(message))


def test_job_texts_are_bounded() -> None:
    base: dict[str, Any] = {
        "name": "n", "base_model": "m", "environment": {"id": "calculator"}, "stop": {"steps": 1},
    }  # fmt: skip
    JobSpec.model_validate(base)
    for wrong in (
        {"base_model": "x" * 15_000_000},
        {"environment": {"hosted": "x" * 12_000_000}},
        {"sampling": {"stop": ["x" * 12_000_000]}},
        {"stop": {"steps": 10**400}},
        {"algorithm": {"loss": {"name": "aipo", "rho": 10**400}}},
    ):
        with pytest.raises(ValidationError) as refused:
            JobSpec.model_validate({**base, **wrong})
        assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("count", "letters", "problem"),
    [
        (0, 1, ""),
        (METRICS, METRIC_LETTERS // METRICS, ""),
        (METRICS + 1, 3, f"gave {METRICS + 1} different metrics"),
        (
            METRICS,
            METRIC_LETTERS // METRICS + 1,
            f"gave metrics whose names have {METRIC_LETTERS + METRICS} characters",
        ),
    ],
)
def test_names_of_an_episode_s_metrics_are_bounded_together(count: int, letters: int, problem: str) -> None:
    found = metrics_problem(f"{number:0{letters}}" for number in range(count))
    assert found.partition(" together")[0].partition(", allowed")[0] == problem
