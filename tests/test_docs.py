"""The documentation says what the code does: every field, option and setting with its default and bounds, examples that
are accepted, and links that lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from tests.support.commands import commands, options_of
from tests.support.faces import MODEL, Reach, ThreadedWorker, served

from rookery.client import AdapterFolder, Client, Job
from rookery.client.connection import record
from rookery.controller.views import EvaluationView
from rookery.environments.builtins import BUILTINS, find
from rookery.environments.foreign.games import set_games
from rookery.environments.foreign.verifiers import set_verifiers
from rookery.environments.judges import set_judges
from rookery.environments.reasoning_gym import REPLIES_ARE_CODE
from rookery.environments.verifiers.verifiers import VERIFIERS
from rookery.server.app import build
from rookery.server.schemas import MetricsRow
from rookery.settings import SECTION_OF, Settings, variable_notes
from rookery.spec.parsing import parse_job

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks" / "studies").glob("*.md")),
]

SMALL = 'algorithm={"group_size": 2, "groups_per_step": 2}, stop={"steps": 1}'
"""The steps of an example that is run, instead of its forty."""

MINIMAL = {"name": "x", "base_model": "m", "environment": {"hosted": "x"}, "stop": {"steps": 1}}


def sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def blocks(page: Path, language: str) -> Iterator[str]:
    for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        yield match[1]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_pages_are_generated_from_the_code() -> None:
    for page, text in generator().pages().items():
        assert page.read_text(encoding="utf-8") == text, "run: make docs"


def test_every_field_and_setting_has_a_meaning() -> None:
    models: list[type[BaseModel]] = [*generator().PARTS.values(), *VERIFIERS.values(), Settings]
    models += [builtin.options for builtin in BUILTINS.values()]
    sections = [field.annotation for field in Settings.model_fields.values()]
    models += [section for section in sections if isinstance(section, type) and issubclass(section, BaseModel)]
    missing = [
        f"{model.__name__}.{name}"
        for model in models
        for name, field in model.model_fields.items()
        if not field.description and name not in (*SECTION_OF.values(), "name")
    ]
    assert missing == []


def test_reasoning_gym_tasks_that_run_code_are_documented() -> None:
    documented = sections(ROOT / "docs" / "environments.md")["The reasoning-gym extra"]
    assert all(f"`{task}`" in documented for task in REPLIES_ARE_CODE) and len(REPLIES_ARE_CODE) == 10


@pytest.fixture
def named() -> Iterator[None]:
    """The judges, packages and games that the pages name."""
    set_judges("strict=https://api.openai.com/v1 gpt-4.1")
    set_verifiers("/opt/verifiers/bin/python gsm8k")
    set_games("/opt/games/bin/python gymnasium/FrozenLake-v1 textarena/GuessTheNumber-v0")
    yield
    for clear in (set_judges, set_verifiers, set_games):
        clear("")


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_examples_are_jobs(page: Path) -> None:
    for text in blocks(page, "yaml"):
        example = yaml.safe_load(text)
        job = parse_job({**MINIMAL, **example})
        if job.environment.id is not None:
            find(job.environment.id).check(job.environment.options)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_compile(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_readme_shows_the_examples() -> None:
    """Another test runs them on the real model and compares rewards."""
    examples = ROOT / "examples"
    readme = ROOT / "README.md"
    assert next(blocks(readme, "python")) == (examples / "own_task.py").read_text(encoding="utf-8")
    assert next(blocks(readme, "yaml")) == (examples / "sums.yaml").read_text(encoding="utf-8")


UNKNOWN: dict[str, list[Any]] = {
    "metrics": [{**dict.fromkeys(MetricsRow.model_fields), "step": 1}, {"step": 1}],
    "evaluations": [{**dict.fromkeys(EvaluationView.model_fields), "version": 0}],
}
"""By method of a job, records without figures: null, or missing as those of a job on rows are."""
UNKNOWN["follow"] = [["metrics", row] for row in UNKNOWN["metrics"]]


def loops(text: str) -> Iterator[ast.For]:
    """The loops of a program over the records of its job."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and ast.unparse(node.iter)[:4] == "job.":
            yield node


def test_printed_figures_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever README, docs, examples and skills print what a job returns."""
    pages = [*PAGES, *sorted((ROOT / "skills").rglob("*.md"))]
    texts = {f"{page.name}, block {n}": text for page in pages for n, text in enumerate(blocks(page, "python"))}
    texts |= {file.name: file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples").glob("*.py"))}
    tried = []
    for name, text in texts.items():
        for loop in loops(text):
            tried.append(name)
            asked = ast.unparse(loop.iter).removeprefix("job.").partition("(")[0]
            job = SimpleNamespace(**{method: lambda given=given: record(given) for method, given in UNKNOWN.items()})
            exec(compile(ast.Module([loop], []), f"{name}: job.{asked}()", "exec"), {"job": job})
            assert "None" not in capsys.readouterr().out, name
    assert len(tried) >= 9 and {"README.md, block 0", "own_task.py", "client.md, block 0"} <= set(tried)


def test_environment_example_runs(tmp_path: Path, reach: Reach) -> None:
    """One step of it, with a real service and a worker that computes nothing."""
    page = "docs/environments.md"
    text = next(blocks(ROOT / page, "python"))
    example, replaced = re.subn(r'base_model="[^"]+"(.*?)stop=\{"steps": 40\}', rf'base_model="{MODEL}"\1{SMALL}', text,
                                flags=re.DOTALL)  # fmt: skip
    assert replaced == 1
    with served(tmp_path) as service, ThreadedWorker.of(service):
        reach(service)
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


def invocations(page: Path) -> Iterator[list[str]]:
    """The words after ``rookery`` wherever a page shows a command."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = "\n".join(block for language, block in fences if language in ("", "bash"))
    inline = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in [*fenced.replace("\\\n", " ").splitlines(), *inline]:
        for shown in re.findall(r"(?:^|[\s/])rookery ([a-z][^#|&;]*)", line.replace("\n", " ")):
            yield [word.rstrip(",.;") for word in shown.split()]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "skills/rookery/SKILL.md"], ids=lambda page: page.name)
def test_commands_exist_with_their_options(page: Path) -> None:
    every, groups = commands(), {name.split()[0] for name in commands() if " " in name}
    for words in invocations(page):
        name = " ".join(words[:2]) if words[0] in groups and len(words) > 1 else words[0]
        if name in groups:  # a group alone
            continue
        assert name in every, f"{page.name}: rookery {name}"
        given = {re.split("[=,]", word)[0] for word in words if re.match("--?[a-z]", word)}
        assert given <= options_of(every[name]) | {"--help", "--debug"}, f"{page.name}: rookery {' '.join(words)}"


def test_each_published_system_has_one_command_that_exists() -> None:
    rows = re.findall(r"^\| (\w+) \| [^|]+ \| `([^`]+)` \| \[[^|]+\) \|$", sections(ROOT / "docs" / "concepts.md")[
        "Published systems"
    ], re.MULTILINE)  # fmt: skip
    assert {"AstraFlow", "HetRL", "TensorHub", "xRouter"} <= {system for system, _ in rows}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for system, command in rows:
        program, *words = command.split()
        if program == "make":
            assert words[0] in targets, system
        elif program == "rookery":
            assert words[0] in commands(), system
            assert all((ROOT / word).is_file() for word in words if "/" in word), system
        else:
            file = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
            assert program == ".venv/bin/python" and (ROOT / file).is_file(), system


def test_every_command_is_documented() -> None:
    shown = {" ".join(words[:size]) for page in PAGES for words in invocations(page) for size in (1, 2)}
    assert set(commands()) - shown == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_endpoints_exist(page: Path) -> None:
    paths = build(None).openapi()["paths"]  # type: ignore[arg-type]  # nothing is served by this one
    for method, path, query in re.findall(
        r"\b(GET|POST|PUT|PATCH|DELETE) (/(?:api|v1|inference)/[\w/{}.@…:-]*)(?:\?([^`]*))?`",
        page.read_text(encoding="utf-8"),
    ):
        wanted = [part if re.fullmatch(r"[a-z][a-z0-9_.-]*", part) else "*" for part in path.split("/")[1:]]
        fitting = [
            operations[method.lower()]
            for known, operations in paths.items()
            if method.lower() in operations and fits(wanted, known.split("/")[1:])
        ]
        assert fitting, f"{page.name}: {method} {path}"
        names = {one.partition("=")[0] for one in query.split("&") if one}
        given = [{one["name"] for one in operation.get("parameters", ())} for operation in fitting]
        assert any(names <= known for known in given), f"{page.name}: {path}?{query}"


def fits(wanted: list[str], known: list[str]) -> bool:
    """Whether a path of a page, with ``*`` for its variables, is this one of the API."""
    return len(wanted) == len(known) and all(
        ours == "*" if theirs.startswith("{") else ours == theirs for ours, theirs in zip(wanted, known, strict=True)
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    examples = {"ROOKERY_JUDGE_KEY", "ROOKERY_BASE_URL"}  # names of an administrator's choice, and of a client's
    named = set(re.findall(r"\bROOKERY_[A-Z_]*[A-Z]\b", text)) - examples
    assert variable_notes(dict.fromkeys(named, "1")) == []


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
            anchors.update(re.findall(r'<a id="([^"]+)">', there.read_text(encoding="utf-8")))
            assert anchor in anchors, f"{page.name}: {link}"


def test_every_public_method_of_the_client_is_in_its_page() -> None:
    page = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    for kind in (Client, Job, AdapterFolder):
        for name, method in vars(kind).items():
            if not name.startswith("_") and callable(method):
                assert (method.__doc__ or "").strip().endswith("."), f"{kind.__name__}.{name} has no docstring"
                assert re.search(rf"^\*\*`{name}\(", page, re.MULTILINE), f"{kind.__name__}.{name} is missing"
    for name in ("episodes", "events", "versions", "follow", "delete"):
        assert name in page
