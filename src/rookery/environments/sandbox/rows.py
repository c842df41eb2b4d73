"""Rows of programming tasks: what a row asks of a reply's code, and how much of it the code passes.

A row has one of

* ``tests``: Python that runs after the reply's code in its module, a text or a list of texts, each one check;
* ``cases``: programs' inputs and outputs, ``[{"stdin": …, "stdout": …}, …]``, each one check;
* ``files``: a project, texts by path, with its tests in files ``test*.py``; the reply is the text of ``file``,
  ``solution.py`` by default.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from rookery.environments.messages import shown
from rookery.environments.sandbox.sandbox import Program, ProgramLimits, ProgramResult, Sandbox, check_path

FORMS = ("tests", "cases", "files")
"""Fields of which a row has exactly one."""

MOST_CHECKS = 100
"""Checks of a row; each case is a process."""

DEFAULT_FILE = "solution.py"

_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([\w+.-]*+)([^\n]*+)\n", re.MULTILINE)
_PYTHON = re.compile(r"i?py(?:thon)?[0-9.]*", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """One input of a program, and what it has to write."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class CodeTask:
    """The checks of one row."""

    tests: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """The project without its tests."""
    project_tests: Mapping[str, str] = field(default_factory=dict)
    file: str = DEFAULT_FILE


@dataclass(frozen=True)
class CodeScore:
    """How a reply's code did."""

    right: bool
    passed: float
    """The share of checks that passed."""
    timed_out: bool


def task_of(row: Mapping[str, Any]) -> CodeTask:
    """Raises ValueError, naming the field, for a row that has no checks or some that nothing can pass."""
    given = [name for name in FORMS if row.get(name) is not None]
    if not given:
        has = ", ".join(map(repr, row)) or "nothing"
        raise ValueError(f"the row has no tests, cases or files to check code with, but {has}; give one of them")
    if len(given) > 1:
        raise ValueError(f"the row has {' and '.join(given)}; give one of them")
    value = row[given[0]]
    if given == ["tests"]:
        return CodeTask(tests=_tests(value))
    if given == ["cases"]:
        return CodeTask(cases=_cases(value))
    return _project(value, row.get("file", DEFAULT_FILE))


def code_of(reply: str) -> str:
    """The code in a reply: the last fenced block of Python, to the reply's end where its end is missing, without the
    indentation of its fence (CommonMark 0.31, section 4.5). A block without a language counts where none is Python's:
    often it is the output. Without either it is the whole reply."""
    position, named, bare = 0, None, None
    while (opening := _FENCE.search(reply, position)) is not None:
        indent, fence, language, rest = opening.groups()
        if fence[0] == "`" and "`" in rest:  # code within a line
            position = opening.end()
            continue
        end_of = re.compile(rf"^[ \t]*{re.escape(fence)}[`~]*[ \t]*\r?$", re.MULTILINE)
        closing = end_of.search(reply, opening.end())
        position = closing.end() if closing is not None else len(reply)
        block = reply[opening.end() : closing.start() if closing is not None else len(reply)]
        if indent:
            block = re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", block, flags=re.MULTILINE)
        if _PYTHON.fullmatch(language):
            named = block
        elif not language:
            bare = block
    return next((block for block in (named, bare) if block is not None), reply)


def score(sandbox: Sandbox, limits: ProgramLimits, code: str, task: CodeTask) -> CodeScore:
    """Runs the checks. Raises :class:`~rookery.environments.sandbox.sandbox.SandboxError` where they have no result."""
    if task.cases:
        return _score_cases(sandbox, limits, code, task.cases)
    if task.tests:
        program, count = Program(code, asserts=task.tests), len(task.tests)
    else:
        program = Program(None, files={**task.files, task.file: code}, tests=task.project_tests)
        count = 0
    result = sandbox.run(program, limits)
    count = count or max(1, len(result.passed))  # code that forges reports can report more checks than there are
    return CodeScore(result.status == "ok", sum(result.passed[:count]) / count, result.status == "time")


def _score_cases(sandbox: Sandbox, limits: ProgramLimits, code: str, cases: tuple[Case, ...]) -> CodeScore:
    passed, timed_out = 0, False
    for case in cases:
        result = sandbox.run(Program(code, stdin=case.stdin), limits)
        passed += _wrote(result, case.stdout)
        timed_out = timed_out or result.status == "time"
        if timed_out:  # the other inputs would take as long
            break
    return CodeScore(passed == len(cases), passed / len(cases), timed_out)


def _wrote(result: ProgramResult, expected: str) -> bool:
    """White space at the ends of lines and of the output does not count."""
    return result.status == "ok" and _lines(result.stdout) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 0 < len(texts) <= MOST_CHECKS:
        raise ValueError(f"tests is {shown(value)}; give a text, or a list of 1 to {MOST_CHECKS} texts")
    for number, text in enumerate(texts):
        name = "tests" if isinstance(value, str) else f"tests.{number}"
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name} is {shown(text)}; give Python that raises where the reply is wrong")
        _compiled(text, name)
    inert = [_checks_nothing(ast.parse(text).body) for text in texts]
    if all(inert) or "compares" in inert:
        number = inert.index("compares") if "compares" in inert else 0
        name = "tests" if isinstance(value, str) else f"tests.{number}"
        does = "compares without assert" if inert[number] == "compares" else "checks nothing"
        raise ValueError(f"{name} {does}, so every reply would be right; write assert, or call what it defines")
    return tuple(texts)


def _checks_nothing(statements: Sequence[ast.stmt]) -> Literal["", "defines", "compares"]:
    """Whether none of a test's statements can fail for a wrong reply, and what they do instead; empty where one can."""
    found: Literal["defines", "compares"] = "defines"
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp()):
                found = "compares"
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Assert(test=ast.Constant() | ast.Tuple()):
                pass
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if statement.decorator_list or _calls([*statement.args.defaults, *statement.args.kw_defaults]):
                    return ""
            case ast.ClassDef():
                if statement.decorator_list or _calls(statement.bases) or not _checks_nothing(statement.body):
                    return ""
            case ast.Expr() | ast.Assign() | ast.AnnAssign():
                if _calls([statement]):
                    return ""
            case _:
                return ""
    return found


def _calls(nodes: Sequence[ast.AST | None]) -> bool:
    return any(isinstance(inner, ast.Call) for node in nodes if node is not None for inner in ast.walk(node))


def _cases(value: Any) -> tuple[Case, ...]:
    form = '{"stdin": "…", "stdout": "…"}'
    if not isinstance(value, list) or not 0 < len(value) <= MOST_CHECKS:
        raise ValueError(f"cases is {shown(value)}; give a list of 1 to {MOST_CHECKS} such as {form}")
    cases = []
    for number, case in enumerate(value):
        known = isinstance(case, dict) and case.keys() <= {"stdin", "stdout"} and "stdout" in case
        if not known or not all(isinstance(text, str) for text in case.values()):
            raise ValueError(f"cases.{number} is {shown(case)}; give {form}")
        if not case["stdout"].strip():
            raise ValueError(
                f"cases.{number}.stdout is {shown(case['stdout'])}: a program that writes nothing passes it"
            )
        cases.append(Case(case.get("stdin", ""), case["stdout"]))
    return tuple(cases)


def _project(files: Any, file: Any) -> CodeTask:
    if not isinstance(files, dict) or not files or not all(isinstance(text, str) for text in files.values()):
        raise ValueError(f"files is {shown(files)}; give texts by their path")
    if not isinstance(file, str):
        raise ValueError(f"file is {shown(file)}; give the path of the file that the reply is")
    for path in [*files, file]:
        check_path(path)
    tests = {path: text for path, text in files.items() if _is_test(path)}
    if not tests:
        raise ValueError(f"files has no tests, but {shown(sorted(files))}; give some in files named test….py")
    if file in tests:
        raise ValueError(f"file is {shown(file)}, which is one of the tests; give another path")
    for path, text in tests.items():
        _compiled(text, f"files.{path}")
    helpers = {path: text for path, text in files.items() if path not in tests}
    return CodeTask(files=helpers, project_tests=tests, file=file)


def _is_test(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.startswith("test") and name.endswith(".py")


def _compiled(text: str, name: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(f"{name} is no Python: {getattr(error, 'msg', error)}") from None
