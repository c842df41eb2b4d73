"""The documentation says what the code does: every field, option and setting with its default and bounds, examples that
are accepted, and links that lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tests.support.faces import MODEL, ScriptedWorker, served, tokenizer

from rookery.cli.app import app
from rookery.client import Client
from rookery.environments.builtins import BUILTINS, find
from rookery.environments.reasoning_gym import REPLIES_ARE_CODE
from rookery.environments.verifiers.verifiers import VERIFIERS, Expectation, VerifierOptions
from rookery.settings import SECTION_OF, Settings
from rookery.spec import job as spec
from rookery.spec import policy
from rookery.spec.job import LOSS_PARAMETERS
from rookery.spec.parsing import parse_job

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

JOB_PARTS: dict[str, type[BaseModel]] = {
    "Job": spec.JobSpec,
    "environment": spec.EnvironmentSpec,
    "policies": policy.PolicySpec,
    "optimizer": policy.OptimizerSpec,
    "schedule": policy.ScheduleSpec,
    "warm_start": policy.WarmStart,
    "algorithm": spec.AlgorithmSpec,
    "loss": spec.LossSpec,
    "sampling": spec.SamplingSpec,
    "evaluation": spec.EvaluationSpec,
    "checkpoints": spec.CheckpointSpec,
    "stop": spec.StopSpec,
    **{id: builtin.options for id, builtin in BUILTINS.items()},
    "Common options": VerifierOptions,
    **{name: verifier for name, verifier in VERIFIERS.items() if name != "math"},  # it has the common ones only
    "json fields": Expectation,
}
"""Which section of docs/job.md documents which model."""

COMPARED_LENGTH = 80
"""Longer default texts are described, not repeated."""

SMALL = 'algorithm={"group_size": 2, "groups_per_step": 2}, stop={"steps": 1}'
"""What an example that is run has in the place of its forty steps."""

MINIMAL = {"name": "x", "base_model": "m", "environment": {"hosted": "x"}, "stop": {"steps": 1}}


def sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> dict[str, list[str]]:
    """Table rows by the name in their first cell."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" |")]
        if line.startswith("| `") and len(cells) == 4:
            found[cells[0].strip("`")] = [cell.strip() for cell in cells[1:]]
    return found


def blocks(page: Path, language: str) -> Iterator[str]:
    for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield match[1]


def fields() -> Iterator[Any]:
    for section, model in JOB_PARTS.items():
        common = issubclass(model, VerifierOptions) and model is not VerifierOptions
        inherited = VerifierOptions.model_fields if common else {}
        for name, field in model.model_fields.items():
            tag = issubclass(model, tuple(VERIFIERS.values())) and name == "name"
            if name not in inherited and not tag:
                yield pytest.param(section, field.alias or name, field, id=f"{section}.{name}")


@pytest.mark.parametrize(("section", "name", "field"), list(fields()))
def test_a_field_of_a_job_is_documented(section: str, name: str, field: FieldInfo) -> None:
    table = rows(sections(ROOT / "docs" / "job.md")[section])
    assert name in table, f"docs/job.md, {section}: no row for `{name}`"
    default, allowed, _ = table[name]
    check_default(default, field)
    stated = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", allowed)}
    for bound in bounds(field):
        assert bound in stated or f"above {bound:g}" in allowed, f"{section}.{name}: the bound {bound:g} is not said"
    for choice in choices(field.annotation):
        assert f"`{choice}`" in allowed, f"{section}.{name}: `{choice}` is not said"


def check_default(shown: str, field: FieldInfo) -> None:
    if field.is_required():
        assert shown == "required"
        return
    default = field.get_default(call_default_factory=True)
    if default is None:
        assert shown == "none"
    elif isinstance(default, str):
        assert shown.strip("`") == default or len(default) > COMPARED_LENGTH or "\n" in default
    elif isinstance(default, bool | int | float):
        assert type(default)(yaml.safe_load(shown.strip("`"))) == default


def bounds(field: FieldInfo) -> Iterator[float]:
    for limit in field.metadata:
        for kind, name in ((annotated_types.Ge, "ge"), (annotated_types.Gt, "gt"), (annotated_types.Le, "le"),
                           (annotated_types.Lt, "lt")):  # fmt: skip
            if isinstance(limit, kind):
                yield float(getattr(limit, name))


def choices(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    for inner in get_args(annotation):
        yield from choices(inner)


def test_nothing_is_documented_that_is_not_there() -> None:
    documented = sections(ROOT / "docs" / "job.md")
    for section, model in JOB_PARTS.items():
        known = {field.alias or name for name, field in model.model_fields.items()}
        known |= set(spec.AlgorithmSpec.model_fields) | set(LOSS_PARAMETERS)
        assert set(rows(documented[section])) <= known, section


def test_every_loss_and_every_verifier_is_documented() -> None:
    documented = sections(ROOT / "docs" / "job.md")
    for name, parameters in LOSS_PARAMETERS.items():
        line = next(line for line in documented["loss"].splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{key}: {value}`" in line for key, value in parameters.items()), name
    assert set(VERIFIERS) <= set(documented)
    assert set(VERIFIERS["math"].model_fields) == {*VerifierOptions.model_fields, "name"}


def test_every_task_that_is_refused_is_documented() -> None:
    documented = sections(ROOT / "docs" / "environments.md")["The reasoning-gym extra"]
    assert all(f"`{task}`" in documented for task in REPLIES_ARE_CODE) and len(REPLIES_ARE_CODE) == 10


@pytest.mark.parametrize("name", ["data", "cache", *SECTION_OF])
def test_a_setting_is_documented(name: str) -> None:
    table = rows(sections(ROOT / "docs" / "operations.md")["Settings"])
    variable = f"ROOKERY_{name.upper()}"
    assert variable in table
    default = Settings().flat()[name]
    said = table[variable][0].strip("`")
    if isinstance(default, bool | int | float):
        assert type(default)(yaml.safe_load(said)) == default
    else:
        assert said == (str(default) or "empty")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_examples_are_jobs(page: Path) -> None:
    for text in blocks(page, "yaml"):
        example = yaml.safe_load(text)
        job = parse_job(example if "base_model" in example else {**MINIMAL, **example})
        if job.environment.id is not None:
            find(job.environment.id).check(job.environment.options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_compile(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", ["README.md", "docs/environments.md"])
def test_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one of each page, for a step, against a real service whose worker computes nothing."""
    text = next(blocks(ROOT / page, "python"))
    example, replaced = re.subn(r'base_model="[^"]+"(.*?)stop=\{"steps": 40\}', rf'base_model="{MODEL}"\1{SMALL}', text,
                                flags=re.DOTALL)  # fmt: skip
    assert replaced == 1
    with served(tmp_path) as service:
        token = (tmp_path / "data" / "worker.token").read_text().strip()
        with ScriptedWorker(service.url, token, tokenizer(tmp_path)):
            monkeypatch.setenv("ROOKERY_URL", service.url)
            monkeypatch.setenv("ROOKERY_KEY", service.key)
            monkeypatch.chdir(tmp_path)
            names: dict[str, Any] = {"__name__": "example"}
            exec(compile(example, page, "exec"), names)
            with Client() as client:
                assert [job.show().state for job in client.jobs()] == ["completed"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:tests|src)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"
    for name in re.findall(r"`((?:controller|worker|scheduling|algorithms|environments)/[\w/.]+)`", text):
        assert (ROOT / "src" / "rookery" / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for text in blocks(page, "bash"):
        named = re.findall(r"^(?:\S*/)?rookery ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= known, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
        link = target[0] or target[1]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {link}"
        if anchor:
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in sections(there)}
            assert anchor in anchors, f"{page.name}: {link}"
