"""The rules of the house: sizes, one name for one thing, the direction of imports, the field's words."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import graphlib
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, get_type_hints

import pytest

from rookery.controller.context import ControllerContext
from rookery.controller.services import Records, Services

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rookery"

MAX_FILE = 500
"""Lines of code of one file (``code_lines``): a file is as long as its idea."""

ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "bounds": set(),
    "turns": {"children"},
    "tenant_loop": {"turns"},
    "clock": set(),
    "children": set(),
    "lines": set(),
    "folders": {"errors"},
    "machine": set(),
    "network": {"errors"},
    "pace": set(),
    "settings": {"errors", "bounds", "folders", "network"},
    "aio": {"clock"},
    "spec": {"errors", "bounds"},
    "protocol": {"errors", "aio", "clock", "bounds", "turns", "network"},
    "algorithms": set(),
    "scheduling": {"errors", "spec"},
    "telemetry": {"errors", "settings"},
    "tokenization": {"errors", "bounds", "folders"},
    "storage": {"errors", "folders", "turns", "network", "pace", "protocol", "spec"},
    "environments": {
        "errors", "aio", "children", "bounds", "turns", "tenant_loop", "folders", "machine", "network", "settings",
        "protocol", "spec", "telemetry.log", "tokenization.written",
    },
    "controller": {
        "errors", "aio", "clock", "bounds", "turns", "network", "settings", "protocol", "spec", "algorithms",
        "scheduling", "telemetry", "tokenization", "storage", "environments",
    },
    "worker": {
        "errors", "aio", "children", "lines", "bounds", "turns", "folders", "machine", "network", "pace",
        "settings", "protocol", "spec", "algorithms", "scheduling", "tokenization", "telemetry",
    },
    "start": {"cli"},
    "client": {
        "errors", "aio", "folders", "lines", "network", "pace", "settings", "spec", "environments",
        "storage.data_dir", "telemetry.numbers",
    },
    "cluster": {"errors", "aio", "children", "turns", "machine", "network", "settings", "tokenization"},
    "simulation": {
        "errors", "aio", "clock", "folders", "settings", "protocol", "spec", "scheduling", "tokenization", "storage",
        "controller", "environments", "algorithms",
    },
}  # fmt: skip
"""The imports that each room may have. ``server`` and ``cli`` stand above all; only ``cli`` imports ``server``."""

CONTROLLER_FLOORS = [
    {"views", "indexed"},
    {"episode_views", "spec_warnings", "service_time", "outages", "sink_run"},
    {"services", "quotas", "fleet", "feeds", "mlflow", "trackio_run", "wandb_run"},
    {"weights", "timeline", "planned", "job_sinks"},
    {"rollout", "training"},
    {"offload", "usage", "targets", "uploads"},
    {"context", "prompts", "validation"},
    {"jobs", "sessions", "completions"},
    {"deletions", "episodes", "stored_spans"},
    {"activity"},
    {"queries", "options"},
    {"controller"},
]
"""Packages and modules of ``controller/`` from the ground up: each imports only those below it, and its own floor not
at all. Every import counts, also within functions and those for types alone."""

IMPLEMENTATIONS = {"engine": {"native", "hf", "vllm"}, "trainer": {"native", "hf", "fsdp"}}
"""Implementations of the engine and of the trainer, none of which imports another one. What several of them use stands
above them, in ``worker/engine`` or ``worker/trainer``."""

PRIVATE_NAMES_ALLOWED = 20

DIALECT = [
    name.split("_")
    for name in """
    intake desk desks lending lender lend absences holdings trainee open_step measuring client_model billing pulse
    ledger groupable failure_window bye granted kv_store pooled_runner growing_text key_first waited_too_long fact
    express asked_model stored_job hand_off said_before lose_head carry_out given_back handed_off anew aside
    settle_tiles spares heard unsent_most
    """.split()
]
"""Words of the former private dialect. No name has them, in whatever case, neither whole nor as a part."""

DIALECT_CLASSES = """
Looking World Rollouts Places Guest Remotes Feeds Payer Plateau Lanes Beat Forget Observed News Ahead Chain Kept Draw
Bundle Pieces Judges Tail Words Site Move
""".split()
"""Words of that dialect that are ordinary in another case: no class or type has them as its whole name."""

LOCATION = {"storage", "server/launcher.py", "cli/admin.py"}
"""Where *place* names the place of the artifacts. A name has it for nothing else: write *index*, *position*, *cursor*,
*slot*, *folder*."""

COLLOQUIAL = """
said says told tell tells anew aside beside own crowd crowds company stranger strangers neighbour trouble spoil whatever
whoever somebody nobody everybody goes_on go_on going_on lets_go let_go
""".split()
"""Words that a test's name must not have: write *reported*, *sent*, *again*, *next to*, *resumes*, *deleted*."""

TERMS = {"own", "beside", "crowd", "tell"}
"""Words among them that names of the package have: lanes run ``beside`` each other, ``tell`` is a file's method."""


parsed = cache(ast.parse)


@cache
def sources(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, comments, docstrings or imports."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(source)):
        docstring = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_files_hold_one_idea() -> None:
    long = {path: text for path, text in sources(SOURCE).items() if text.count("\n") > MAX_FILE}
    files = {str(path.relative_to(SOURCE)): code_lines(text) for path, text in long.items()}
    assert {path: lines for path, lines in files.items() if lines > MAX_FILE} == {}


def classes() -> Iterator[tuple[str, Path]]:
    for path, text in sources(SOURCE).items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                yield node.name, path


def test_no_two_classes_share_a_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in classes():
        found[name].append(str(path.relative_to(SOURCE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def imported(path: Path) -> Iterator[list[str]]:
    """The parts of each module below ``rookery`` that the file imports, also where only types are meant."""
    for node in ast.walk(parsed(sources(SOURCE)[path])):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rookery":
            parts = node.module.split(".")[1:]
            yield from [parts] if parts else [[alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1:] for alias in node.names if alias.name.startswith("rookery."))


def test_rooms_import_one_way() -> None:
    wrong = set()
    for path in sources(SOURCE):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("server", "cli", "__init__"):
            continue
        for parts in imported(path):
            if parts[0] != room and not {parts[0], ".".join(parts)} & ARROWS[room]:
                wrong.add(f"{path.relative_to(SOURCE)} imports {'.'.join(parts)}")
    assert wrong == set()


def test_controller_imports_downwards() -> None:
    floor = {room: number for number, rooms in enumerate(CONTROLLER_FLOORS) for room in rooms}
    folder = SOURCE / "controller"
    files = {path: path.relative_to(folder).parts[0].removesuffix(".py") for path in sources(folder)}
    del files[folder / "__init__.py"]
    assert {*files.values()} == floor.keys()
    wrong = set()
    for path, here in files.items():
        for parts in imported(path):
            if parts == ["controller"] or (
                parts[0] == "controller" and parts[1] != here and floor[parts[1]] >= floor[here]
            ):
                wrong.add(f"{path.relative_to(SOURCE)} imports {'.'.join(parts)}")
    assert wrong == set()


MOST_FIELDS = 10
"""Of a context that is passed around, those of the contexts in it included: beyond it, nobody can say what its user
uses."""

WHOLE_CONTEXT = {"JobRunner", "JobContext", "Sessions", "TrainingRun", "JobQueries", "ControllerContext"}
"""The top rooms of the controller, which get all of it. Others get the parts that they use."""


def leaves(kind: type[Any]) -> list[str]:
    """The fields of a context; instead of a field that is a context itself, the fields of that one. A context is a data
    class without methods."""
    found: list[str] = []
    for name, hint in get_type_hints(kind).items():
        nested = dataclasses.is_dataclass(hint) and not any(
            isinstance(value, FunctionType) and not MADE.fullmatch(key) for key, value in vars(hint).items()
        )
        found += [f"{name}.{leaf}" for leaf in leaves(hint)] if nested else [name]  # type: ignore[arg-type]
    return found


MADE = re.compile(r"__(?!call__)\w+__")
"""Names of the methods that ``dataclass`` makes."""


@dataclasses.dataclass
class _Few:
    one: int
    two: str


@dataclasses.dataclass
class _Nested:
    few: _Few
    three: Path


def test_leaves_are_those_of_nested_contexts() -> None:
    assert leaves(_Nested) == ["few.one", "few.two", "three"]


def test_contexts_of_lower_rooms_are_small() -> None:
    assert len(leaves(ControllerContext)) > MOST_FIELDS, "it is one of the whole contexts"
    for kind in (Services, Records):
        assert len(leaves(kind)) <= MOST_FIELDS, leaves(kind)


MOST_PARAMETERS = 8

OUTSIDE = ("cli/", "server/routes/", "worker/engine/native/kernels/")
"""Files with functions whose parameters are those of a command, of a request or of a compiled kernel."""


def parameters(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The functions of a file with the number of their parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield node.name, sum(one.arg not in ("self", "cls") for one in given)


def test_functions_have_few_parameters() -> None:
    """Parameters that travel together are one value."""
    assert dict(parameters(ast.parse("def f(self, a, /, b, *, c): ..."))) == {"f": 3}
    found = [
        f"{path.relative_to(SOURCE)}: {name} has {count}"
        for path, text in sources(SOURCE).items()
        for name, count in parameters(parsed(text))
        if count > MOST_PARAMETERS and not str(path.relative_to(SOURCE)).startswith(OUTSIDE)
    ]
    assert not found


def annotated(tree: ast.AST, names: set[str]) -> Iterator[str]:
    """The classes, or else the functions, of a file that have a parameter or a field of a type of these names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            hints = (one.annotation for one in ast.walk(node) if isinstance(one, ast.arg | ast.AnnAssign))
            found = {part.id for hint in hints if hint for part in ast.walk(hint) if isinstance(part, ast.Name)}
            if found & names:
                yield node.name


STATES = re.compile(r"dict\[tuple\[\w*(State|Stage|Phase|Delivery), \w*Event\], ")

REFUSING = {"controller/fleet/agents.py", "controller/rollout/request.py"}
"""Files that look up an event in a table of states themselves, and raise an error that tells more of the thing than
that of ``next_state`` does."""


def test_an_event_without_a_place_in_the_table_of_states_raises() -> None:
    """A look-up with a default hides a mistake: the thing stays in a state that no line of the table names."""
    tables = {
        node.target.id
        for text in sources(SOURCE).values()
        for node in parsed(text).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if STATES.match(ast.unparse(node.annotation))
    }
    assert tables >= {"TRANSITIONS", "STAGES", "PHASES", "DELIVERIES"}
    found = {
        str(path.relative_to(SOURCE))
        for path, text in sources(SOURCE).items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Attribute) and node.attr == "get"
        if isinstance(node.value, ast.Name) and node.value.id in tables
    }
    assert found == REFUSING


def test_only_top_rooms_get_the_whole_context() -> None:
    users = set()
    for text in sources(SOURCE / "controller").values():
        users |= {*annotated(parsed(text), {"ControllerContext", "Rooms"})}
    assert users == WHOLE_CONTEXT


LATE_BOUND = {
    ("environments/episodes.py", "environment.ask"): "environments of users have no constructor of ours",
    ("server/app.py", "app.openapi"): "FastAPI's way to replace it",
    ("server/launcher.py", "pool.spent"): "the threads exist before the controller whose quotas they charge",
    ("server/launcher.py", "checks.schemas.spent"): "as above",
    ("server/launcher.py", "loop.spent"): "as above, of the event loop",
    ("server/schema_checks.py", "self._threads.spent"): "as above",
    ("worker/model/transformers_model.py", "self.decoder.forward"): "a module of transformers",
    ("worker/trainer/fsdp/module.py", "layer.forward"): "a module of torch",
}
"""Callables that are assigned to an attribute of another object, outside its class, each with its reason. Elsewhere
they are arguments of constructors."""


def late_bound(tree: ast.AST, methods: set[str], function: ast.AST | None = None) -> Iterator[str]:
    """The attributes of other objects that get a lambda, a ``partial``, a method or a function of the file."""
    for node in ast.iter_child_nodes(tree):
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from late_bound(node, methods, inner)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not is_callable(node.value, methods, function):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls"):
                yield ast.unparse(target)


def is_callable(value: ast.AST | None, methods: set[str], function: ast.AST | None) -> bool:
    match value:
        case ast.Lambda():
            return True
        case ast.Call(func=ast.Name(id="partial") | ast.Attribute(attr="partial")):
            return True
        case ast.Attribute(attr=name):
            return name in methods
        case ast.Name(id=name) if function is not None:
            return any(
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
                for node in ast.walk(function)
            )
    return False


def test_no_hook_is_bound_late() -> None:
    """A name that is a method somewhere and a field elsewhere is taken for a field."""
    methods, fields = set[str](), set[str]()
    for text in sources(SOURCE).values():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                        plain = all(isinstance(mark, ast.Call) for mark in one.decorator_list)
                        (methods if plain else fields).add(one.name)
                    elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        fields.add(one.target.id)
    found = {
        (str(path.relative_to(SOURCE)), name)
        for path, text in sources(SOURCE).items()
        for name in late_bound(parsed(text), methods - fields)
    }
    assert found == LATE_BOUND.keys()


def test_hooks_that_are_bound_late_are_found() -> None:
    source = """
class Engine:
    def __init__(self, weights, gate):
        self.gate = gate.close
        self.admission.serves = weights.serves
        gate.on_full = lambda: None
        gate.rows = weights.rows

def wire(gate, call):
    def note(): ...
    gate.note, gate.seen = note, None
    gate.noted = note
    gate.call = call
"""
    found = list(late_bound(ast.parse(source), {"serves", "close"}))
    assert found == ["self.admission.serves", "gate.on_full", "gate.noted"]


@pytest.mark.parametrize("room", IMPLEMENTATIONS)
def test_shared_modules_import_no_implementation(room: str) -> None:
    folder = SOURCE / "worker" / room
    known = IMPLEMENTATIONS[room]
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == known
    wrong = set()
    for path in sources(folder):
        here = path.relative_to(folder).parts[0] if path.parent != folder else ""
        for parts in imported(path):
            other = parts[2] if parts[:2] == ["worker", room] and len(parts) > 2 else here
            if other in known and other != here:
                wrong.add(f"{path.relative_to(SOURCE)} imports {'.'.join(parts)}")
    assert wrong == set()


@pytest.mark.parametrize("name", ["games_process", "verifiers_process"])
def test_programs_of_other_environments_stand_alone(name: str) -> None:
    """Their interpreter is the library's, which has no Rookery."""
    assert list(imported(SOURCE / "environments" / "foreign" / f"{name}.py")) == []


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_files_import_in_no_circle() -> None:
    """Every import counts, also within functions and those for types alone."""
    modules = {module_of(path) for path in sources(SOURCE)}
    imports: dict[str, set[str]] = {}
    for path, text in sources(SOURCE).items():
        found = imports.setdefault(module_of(path), set())
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names} & modules
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= named & modules or {node.module}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@cache
def words_of(name: str) -> list[str]:
    """The words of an identifier, in lower case: ``HTTPServer_2`` has *http*, *server*, *2*."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)]


@cache
def is_of_the_dialect(name: str) -> bool:
    """Of some fifty thousand identifiers most occur many times."""
    return name in DIALECT_CLASSES or any(has_words(name, words) for words in DIALECT)


def has_words(name: str, words: list[str]) -> bool:
    """Whether the name has these words next to each other."""
    found = words_of(name)
    return any(found[at : at + len(words)] == words for at in range(len(found) - len(words) + 1))


def names_in(path: Path, text: str) -> Iterator[tuple[str, str]]:
    """Every identifier of a file, with the file's name and its line."""
    for node in ast.walk(parsed(text)):
        for field in ("name", "attr", "id", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield name, f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}"


COUNTED = (
    "adapters artifacts characters digits entries episodes features fields files groups items jobs machines messages"
    " operations plans policies processes prompts replies requests rows sinks steps targets tenants tokens versions"
    " workers"
).split()
"""Plurals that numbers of lines for users have; each number may be 1."""


def test_numbers_in_texts_agree_with_their_nouns() -> None:
    """A number that is no constant is written with its noun by ``count_of``: "1 step", "2 steps". A rate such as
    tokens/s has one form. Errors of kernels are for programmers."""
    plural = re.compile(rf"\\{{([^{{}}]*)\\}} ([a-z-]+ )?({'|'.join(COUNTED)})\\b(?!/)")
    found = set()
    for path, text in sources(SOURCE).items():
        for node in ast.walk(parsed(text)) if "kernels" not in path.parts else ():
            if not isinstance(node, ast.JoinedStr):
                continue
            values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
            names = {f"v{i}": ast.unparse(part.value) for i, part in enumerate(values)}
            marks = iter(names)
            line = "".join(
                "{" + next(marks) + "}" if isinstance(part, ast.FormattedValue) else str(part.value)
                for part in node.values
                if isinstance(part, ast.FormattedValue | ast.Constant)
            )
            for match in plural.finditer(line):
                if not re.fullmatch(r"(\w+\.)*[A-Z_]+", names[match[1]]):
                    found.add(f"{path.relative_to(ROOT)}:{node.lineno} {match[0]}")
    assert found == set()


@pytest.mark.parametrize("folder", ["src/rookery", "tests", "benchmarks"])
def test_no_name_of_the_former_dialect(folder: str) -> None:
    found = set()
    for path, text in sources(ROOT / folder).items():
        found |= {where for name, where in names_in(path, text) if is_of_the_dialect(name)}
    assert found == set()


def test_place_has_one_meaning() -> None:
    found = set()
    for path, text in sources(SOURCE).items():
        if {str(path.relative_to(SOURCE)), path.relative_to(SOURCE).parts[0]} & LOCATION:
            continue
        found |= {where for name, where in names_in(path, text) if {"place", "places"} & {*words_of(name)}}
    assert found == set()


def test_test_names_are_plain() -> None:
    banned = re.compile(rf"_({'|'.join(COLLOQUIAL)})(?=_|$)", re.IGNORECASE)
    names = {
        node.name
        for text in sources(ROOT / "tests").values()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    clauses = {name for name in names if "what" in words_of(name) or words_of(name)[1] == "who"}  # name the thing
    assert {name for name in names if banned.search(name)} | clauses == set()


def test_names_of_the_package_are_plain() -> None:
    """No name has a word of :data:`COLLOQUIAL` but those of :data:`TERMS`."""
    banned = {word for word in COLLOQUIAL if "_" not in word} - TERMS
    phrases = [word.split("_") for word in COLLOQUIAL if "_" in word]
    found = {
        where
        for path, text in sources(SOURCE).items()
        for name, where in names_in(path, text)
        if banned & {*words_of(name)} or any(has_words(name, words) for words in phrases)
    }
    assert found == set()


def test_tests_use_exported_names() -> None:
    """A test that reaches into ``_private`` names of the package breaks with every refactoring."""
    private = re.compile(r"_[a-z]\w*")
    of_ours = set(re.findall(r"\b_[a-z]\w*", "\n".join(sources(SOURCE).values())))
    found = []
    for path, text in sources(ROOT / "tests").items():
        tree = parsed(text)
        defined = {
            node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
        }
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if name and private.fullmatch(name) and name in of_ours and name not in defined:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rookery"):
                found += [
                    f"{path.relative_to(ROOT)}:{node.lineno} {a.name}" for a in node.names if private.fullmatch(a.name)
                ]
    assert len(found) <= PRIVATE_NAMES_ALLOWED, found


TEXT_MODE = re.compile(r"[rwax]\+?t?")


def names_no_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the platform's encoding, which is not UTF-8 everywhere."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given or None in given:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) < (2 if name == "write_text" else 1)
    if name in ("run", "Popen", "check_output"):
        return any(isinstance(given.get(text), ast.Constant) for text in ("text", "universal_newlines"))
    if name in ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile"):
        of_path = name == "open" and isinstance(call.func, ast.Attribute)
        if of_path and given.keys() - {"mode", "buffering", "errors", "newline"}:
            return False  # an archive, or another thing that opens
        modes = [given["mode"]] if "mode" in given else call.args[0 if of_path else 1 :][:1]
        if not modes:
            return name == "open" and (not of_path or not call.args)
        mode = modes[0]
        return isinstance(mode, ast.Constant) and bool(TEXT_MODE.fullmatch(str(mode.value)))
    return False


def test_every_text_file_names_its_encoding() -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in (SOURCE, ROOT / "docs")
        for path, text in sources(folder).items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Call) and names_no_encoding(node)
    ]
    assert "\n".join(calls) == ""


@pytest.mark.parametrize("folder", ["src/rookery", "tests", "benchmarks"])
def test_docstrings_name_their_subject(folder: str) -> None:
    """A docstring that only names another place says nothing where it stands, one that begins with *what* names
    nothing, and one that begins with *that* or with an ellipsis ends the sentence of another field."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in sources(ROOT / folder).items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith(("See ", "What ", "Who ", "Whoever ", "Whom ", "Those ", "That ", "…"))
    ]
    assert found == []


# --- references -------------------------------------------------------------------------------------------------------

ROLE = re.compile(r":(?:mod|class|func|meth|data|attr):`~?([\w.]+)`")


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a file defines or imports, whatever they are part of."""
    names: set[str] = set()
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Attribute(ctx=ast.Store()):
                names.add(node.attr)
            case ast.alias():
                names.add(node.asname or node.name.split(".")[0])
    return frozenset(names)


def exists(reference: str, where: Path) -> bool:
    """Whether a name in a docstring of the file ``where`` is one of its names, an error that it lets pass, or a name of
    the module that it begins with."""
    parts = reference.split(".")
    if parts[0] not in ("rookery", "tests", "benchmarks"):
        return parts[0] in defined(where) | defined(SOURCE / "errors.py") | {*dir(builtins)}
    folder = SOURCE.parent if parts[0] == "rookery" else ROOT
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if parts and (folder / f"{parts[0]}.py").is_file():
        module = folder / f"{parts.pop(0)}.py"
    else:
        module = folder / "__init__.py"
    return set(parts) <= defined(module)


@pytest.mark.parametrize("folder", ["src/rookery", "tests", "benchmarks"])
def test_docstrings_refer_to_existing_names(folder: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)}: {reference}"
        for path, text in sources(ROOT / folder).items()
        for reference in ROLE.findall(text)
        if not exists(reference, path) and path != Path(__file__)
    }
    assert wrong == set()
