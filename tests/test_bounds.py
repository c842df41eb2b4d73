"""Every text, list, mapping, number and JSON value that a stranger sends has a bound where its field is declared."""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
import msgspec
import pytest
from fastapi.params import Header, Param
from fastapi.routing import APIRoute, APIRouter
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo

import rookery.server
from rookery import protocol
from rookery.bounds import (
    FORMS,
    GIVEN_NAME,
    HASH,
    METADATA,
    METRIC_LETTERS,
    METRICS,
    GivenModel,
    JsonSize,
    is_small,
    metrics_problem,
)
from rookery.environments.builtins import BUILTINS
from rookery.protocol.envhost import FromHost
from rookery.protocol.worker import FromWorker
from rookery.server.schemas import EpisodeEnd, SampleRequest
from rookery.server.tinker.schemas import CreateSession
from rookery.spec.job import JobSpec

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


for module in pkgutil.walk_packages(rookery.server.__path__, "rookery.server."):
    importlib.import_module(module.name)

ROUTERS = {
    id(router): router
    for name, module in [*sys.modules.items()] if name.startswith("rookery.server.")
    for router in vars(module).values() if isinstance(router, APIRouter)
}  # fmt: skip
ROUTES = [route for router in ROUTERS.values() for route in router.routes if isinstance(route, APIRoute)]
"""Every route of every router in the modules of the service."""


def models_in(annotation: Any) -> Iterator[type]:
    """The models in a type, with those of their fields."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_in(field.annotation)
    for argument in get_args(annotation):
        yield from models_in(argument)


ANSWERS = {
    model
    for route in ROUTES
    for kind in (route.response_model, *(response.get("model") for response in route.responses.values()))
    for model in models_in(kind)
}
"""Models that the service sends. One that it reads too is no answer only: no request has such a part."""

STRANGERS = ("rookery.server.", "rookery.environments.", "rookery.spec.job", "rookery.spec.policy")
"""The modules with models that strangers send. Others are read from the operator's files, or are answers."""

SCHEMAS = [
    *(
        model for model in dict.fromkeys(all_of(BaseModel))
        if model not in ANSWERS and model.__module__.startswith(STRANGERS)
    ),
    *get_args(FromWorker),
    *get_args(FromHost),
]  # fmt: skip


@pytest.mark.parametrize("model", SCHEMAS, ids=lambda model: model.__name__)
def test_every_field_has_a_bound(model: type) -> None:
    found = {line for line in problems_of(model) if line.partition(":")[0] not in UNBOUNDED_BY_DESIGN}
    assert found == set()


ONCE = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt, annotated_types.MinLen,
        annotated_types.MaxLen)  # fmt: skip


def bounds_of(model: type[BaseModel]) -> Iterator[str]:
    """The fields that have several bounds of one kind, of which pydantic takes the last one."""
    for name, field in model.model_fields.items():
        kinds = [type(one) for one in flat(field.metadata) if isinstance(one, ONCE)]
        if len(kinds) > len({*kinds}):
            yield f"{model.__name__}.{name}"


def test_no_field_has_two_bounds_of_one_kind() -> None:
    """A bound of an annotation would replace that of its ``Field``."""
    assert {line for model in all_of(BaseModel) if model.__module__.startswith("rookery.")
            for line in bounds_of(model)} == set()  # fmt: skip

    class Doubled(BaseModel):
        context: Annotated[int, Field(ge=1)] = Field(ge=2)

    assert [*bounds_of(Doubled)] == ["Doubled.context"] and Doubled(context=1).context == 1


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


def test_the_walk_finds_the_values_that_every_part_of_the_service_reads() -> None:
    found = {model.__name__ for model in SCHEMAS}
    assert {
        "JobSpec", "PolicySpec", "NewTenant", "ChatRequest", "ResponsesRequest", "TokenRequest", "EpisodeChat",
        "EpisodeResponses", "EpisodeTokens", "DeployedChat", "DeployedCompletion", "JobCreate", "GraderValidate",
        "GraderRun", "AsampleRequest", "OptimizerConfig", "JsonlOptions",
    } <= found  # fmt: skip
    assert {builtin.options for builtin in BUILTINS.values()} <= {*SCHEMAS}
    assert {route.path for route in ROUTES} >= {"/v1/fine_tuning/jobs", "/api/v1/secrets/{secret}", "/api/v1/usage"}


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


def places(annotation: Any, kinds: tuple[type, ...], value: Any) -> Iterator[Any]:
    """JSON of a type with ``value`` in the place of a number of one of these kinds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in kinds or (origin is Literal and {type(one) for one in arguments} & {*kinds}):
        yield value
    elif origin is Annotated:
        yield from places(arguments[0], kinds, value)
    elif origin in (Union, types.UnionType):
        for one in arguments:
            yield from places(one, kinds, value)
    elif origin is tuple and Ellipsis not in arguments:
        found = [next(places(one, kinds, value), None) for one in arguments]
        if any(one is not None for one in found):
            yield found
    elif origin in (list, tuple):
        yield from ([one] for one in places(arguments[0], kinds, value))
    elif origin is dict:
        yield from ({"5": one} for one in places(arguments[1], kinds, value))


NUMBERED = [
    model for model in dict.fromkeys(all_of(BaseModel))
    if model not in ANSWERS
    and model.__module__.startswith((*STRANGERS, "rookery.spec.fleet", "rookery.spec.machine"))
    and model is not EpisodeEnd  # says outcomes, as an environment's Step does
]  # fmt: skip


@pytest.mark.parametrize("model", NUMBERED, ids=lambda model: model.__name__)
def test_a_number_is_no_boolean_and_no_text_and_finite_and_a_boolean_is_neither(model: type[BaseModel]) -> None:
    """Wherever one stands: in a list, a mapping, a union."""
    for name, field in model.model_fields.items():
        wrong = [*places(field.annotation, (int, float), True), *places(field.annotation, (float,), math.nan)]
        alone = field.annotation in (int, float, bool, int | None, float | None, bool | None)
        if alone and not any(isinstance(one, BeforeValidator) for one in field.metadata):  # such as a time: "90m"
            wrong += [*places(field.annotation, (int, float), "3"), *places(field.annotation, (bool,), "yes")]
            wrong += [*places(field.annotation, (bool,), 1)]
        for value in wrong:
            key = field.alias or name
            with pytest.raises(ValidationError) as refused:
                model.model_validate({key: value})
            kinds = {error["type"] for error in refused.value.errors() if error["loc"][:1] == (key,)}
            assert kinds & REFUSALS, (key, value, kinds)


REFUSALS = {
    "boolean_for_number", "number_for_boolean", "text_for_number", "text_for_boolean", "int_type", "finite_number",
    "value_error",
}  # fmt: skip


class Chosen(GivenModel):
    number: Literal[1] | None = None
    boolean: Literal[False] | None = None
    numbers: tuple[Literal["all", 1, 2], ...] = ()
    either: Literal[True, 1] | None = None


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [("number", True, 1), ("number", False, None), ("boolean", 0, False), ("boolean", 0.0, False),
     ("numbers", [True], ("all", 2)), ("either", False, True), ("either", 0, 1)],
)  # fmt: skip
def test_a_given_value_is_of_its_kind(field: str, wrong: Any, right: Any) -> None:
    """``True`` equals 1 in Python."""
    assert getattr(Chosen.model_validate({field: right}), field) == right
    with pytest.raises(ValidationError):
        Chosen.model_validate({field: wrong})


def test_the_walk_of_numbers_reaches_every_place() -> None:
    assert [*places(list[Literal["all", 1]] | None, (int, float), True)] == [[True]]
    found = [*places(dict[str, list[Annotated[int, "…"]] | tuple[float, str] | str | None], (int, float), True)]
    assert found == [{"5": [True]}, {"5": [True, None]}]
    assert sum(bool([*places(field.annotation, (int, float), 1)]) for model in NUMBERED
               for field in model.model_fields.values()) > 150  # fmt: skip


@pytest.mark.parametrize(("value", "read"), [(8, 8), (8.0, 8), (1e1, 10), ("8", None), (8.5, None), ("8.5", None)])
def test_a_whole_number_may_be_written_as_another_number(value: Any, read: int | None) -> None:
    if read is None:
        with pytest.raises(ValidationError):
            SampleRequest.model_validate({"target": "a", "messages": [{"role": "user", "content": ""}], "seed": value})
        return
    asked = {"target": "a", "messages": [{"role": "user", "content": "x"}], "seed": value}
    assert SampleRequest.model_validate(asked).seed == read


def test_every_form_of_a_text_has_words() -> None:
    models = [field for model in SCHEMAS if issubclass(model, BaseModel) for field in model.model_fields.values()]
    fields = [
        param.field_info for route in ROUTES for param in (*route.dependant.query_params, *route.dependant.path_params)
    ]
    patterns = {
        pattern
        for field in [*models, *fields]
        for one in flat(field.metadata)
        if (pattern := getattr(one, "pattern", None))
    }
    assert patterns >= {GIVEN_NAME, HASH} and patterns <= FORMS.keys()


def test_outcomes_may_be_booleans() -> None:
    end = EpisodeEnd.model_validate({"reward": True, "metrics": {"right": False}})
    assert (end.reward, end.metrics) == (1.0, {"right": 0.0})
    for wrong in ("nan", math.inf, "many"):
        with pytest.raises(ValidationError):
            EpisodeEnd.model_validate({"reward": wrong})


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
