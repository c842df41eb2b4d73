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
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

_PYTHON = re.compile(r"i?py(?:thon)?[0-9.]*", re.IGNORECASE)
_FENCE = re.compile(
    rf"(?:^([ \t>]*+)|(?<=[^\s`])[ \t]*+(?=`{{3,}}+[ \t]*+(?i:{_PYTHON.pattern})[ \t]*+\r?\n))"
    r"(`{3,}+|~{3,}+)[ \t]*+([\w+.-]*+)([^\n]*+)\n",
    re.MULTILINE,
)
"""A fence that opens a block: alone on a line, which may be quoted, or, where it names Python, after other text."""


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
    scripts: tuple[str, ...] = ()
    """Paths of tests that check while they are loaded."""
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
    indentation of its fence (CommonMark 0.31, section 4.5). Other text may follow the fence that ends it, which may
    stand at the end of a line of code where no other does. A block without a language counts where none is Python's:
    often it is the output. Without either it is the whole reply."""
    position, named, bare = 0, None, None
    unended: set[str] = set()
    while (opening := _FENCE.search(reply, position)) is not None:
        indent, fence, language, rest = opening.groups()
        if fence[0] == "`" and "`" in rest:  # code within a line
            position = opening.end()
            continue
        closing = _closing(reply, opening.end(), fence, indent or "", unended)
        end = closing.start() if closing is not None else len(reply)
        position = len(reply) if closing is None else end if _FENCE.match(reply, end) and closing[1] else closing.end()
        block = reply[opening.end() : end]
        if indent is None:  # such as in a list
            block = textwrap.dedent(block)
        elif indent:
            block = re.sub(rf"^[ \t{'>' if '>' in indent else ''}]{{1,{len(indent)}}}", "", block, flags=re.MULTILINE)
        if _PYTHON.fullmatch(language):
            named = block
        elif not language:
            bare = block
    return next((block for block in (named, bare) if block is not None), reply)


def _closing(reply: str, start: int, fence: str, indent: str, unended: set[str]) -> re.Match[str] | None:
    """The fence that ends a block; its group is the first word after it. It has at most three spaces more than the one
    that opened it: others stand in texts of the code. ``unended`` are the fences that no later line begins with."""
    mark = rf"{fence}{fence[0]}*+"
    if (opened := indent + fence) not in unended:
        before = rf"[ \t{'>' if '>' in indent else ''}]{{0,{len(indent) + 3}}}+"
        begins = re.compile(rf"^{before}{mark}[ \t]*+([\w+.-]*+)[^\n]*+", re.MULTILINE)
        if (found := begins.search(reply, start)) is not None:
            return found
        unended.add(opened)
    return re.compile(rf"(?<!{fence[0]}){mark}()[ \t]*+\r?$", re.MULTILINE).search(reply, start)


def score(sandbox: Sandbox, limits: ProgramLimits, code: str, task: CodeTask) -> CodeScore:
    """Runs the checks. Raises :class:`~rookery.environments.sandbox.sandbox.SandboxError` where they have no result."""
    if task.cases:
        return _score_cases(sandbox, limits, code, task.cases)
    if task.tests:
        program = Program(code, asserts=task.tests)
    else:
        files = {**task.files, task.file: code}
        program = Program(None, files=files, path=task.file, tests=task.project_tests, scripts=task.scripts)
    result = sandbox.run(program, limits)
    # code that forges reports can report more checks than there are; without a check that ran nothing is right
    count = len(task.tests) or max(1, len(result.passed))
    passed = sum(result.passed[:count])
    return CodeScore(result.status == "ok" and passed == count, passed / count, result.status == "time")


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
    return [line.rstrip() for line in text.rstrip().split("\n")]  # a program writes no other end of a line


def _tests(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not 0 < len(texts) <= MOST_CHECKS:
        raise ValueError(f"tests is {shown(value)}; give a text, or a list of 1 to {MOST_CHECKS} texts")
    for number, text in enumerate(texts):
        name = "tests" if isinstance(value, str) else f"tests.{number}"
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{name} is {shown(text)}; give Python that raises where the reply is wrong")
        _compiled(text, name)
        body = ast.parse(text).body
        successes = (one for one in _run_at_import(body) if _ends_well(one))
        if end := next(filter(None, map(_end_called, [*body, *successes])), ""):
            raise ValueError(
                f"{name} calls {end}, which is no check here; write assert, or give files with unittest's tests"
            )
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
    functions = [one for one in statements if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    unrun = {one.name for one in functions if _returns_unrun(one)}
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp()):
                found = "compares"
            case ast.Expr(value=ast.Call(func=ast.Name(id="all" | "any" | "isinstance"))):
                found = "compares"
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in unrun:
                pass
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Assert(test=ast.Tuple()):
                pass
            case ast.Assert(test=test) if not _names(test):
                pass
            case ast.If(test=test, orelse=instead) if _is_main(test):
                if instead and not _checks_nothing(instead):
                    return ""
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


def _names(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Name) for inner in ast.walk(node))


def _is_main(test: ast.expr) -> bool:
    """Whether a condition holds in a program alone: checks run in a module."""
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


_ENDS = ("exit", "quit", "sys.exit", "os._exit", "unittest.main", "SystemExit")


def _end_called(statement: ast.stmt) -> str:
    """The call of a statement that ends the program in any case; empty without one."""
    called = _called(statement)
    if called is None or (not isinstance(statement, ast.Raise) and not isinstance(called, ast.Call)):
        return ""
    name = ast.unparse(called.func if isinstance(called, ast.Call) else called)
    return name if name in _ENDS else ""


def _called(statement: ast.stmt) -> ast.expr | None:
    """The expression that a statement raises, or evaluates."""
    match statement:
        case ast.Raise(exc=expression) | ast.Expr(value=expression):
            return expression
    return None


def _ends_well(one: ast.stmt) -> bool:
    """Whether a statement ends the program with success."""
    called = _called(one)
    given = called.args if isinstance(called, ast.Call) else []
    return bool(_end_called(one)) and all(isinstance(code, ast.Constant) and not code.value for code in given)


def _calls(nodes: Sequence[ast.AST | None]) -> bool:
    """Whether the value of one of the nodes needs a call."""
    for node in nodes:
        if isinstance(node, ast.Call):
            return True
        if node is not None and not isinstance(node, ast.Lambda) and _calls([*ast.iter_child_nodes(node)]):
            return True
    return False


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
    own = {PurePosixPath(path).stem for path in files if path != file}
    read = {path: _TestFile(ast.parse(text), own) for path, text in tests.items()}
    used = {name for one in read.values() for name in one.used}
    for path, one in read.items():
        if unrun := one.unrun(used):
            raise ValueError(f"files.{path}: {unrun}")
    if not any(one.may_test for one in read.values()):
        raise ValueError(
            f"files has no test in {shown(sorted(tests))}, so every reply would be right; write functions named test…,"
            " or classes of unittest"
        )
    return CodeTask(
        files=helpers, project_tests=tests, scripts=tuple(path for path in tests if read[path].script), file=file
    )


_CASES = ("unittest.TestCase", "TestCase")
_PREPARES = ("print", "sys", "os", "warnings", "logging", "random")
"""First names of calls that check nothing."""


class _TestFile:
    """A file of tests, as far as its text shows how it tests. ``own`` are the modules of its project."""

    def __init__(self, tree: ast.Module, own: Collection[str]) -> None:
        self._own = own
        self._top = list(_run_at_import(tree.body))
        self._functions = [one for one in self._top if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        self._classes = [one for one in self._top if isinstance(one, ast.ClassDef)]
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
        self.used = {node.id if isinstance(node, ast.Name) else node.attr for node in named}
        self.script = any(map(_checks, self._top))
        """It checks while it is loaded."""

    @property
    def may_test(self) -> bool:
        """False where nothing in it is a test, nor can make one."""
        return self.script or any(map(self._may_test, self._top))

    def _may_test(self, one: ast.stmt) -> bool:
        match one:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                return name.startswith("test") or name == "load_tests" or bool(one.decorator_list)
            case ast.ClassDef():
                return not _is_plain(one)
            case ast.ImportFrom(module=module, names=names):  # classes of a helper
                found = {*(module or "").split("."), *(name.name for name in names)}
                return bool(one.level) or not found.isdisjoint({*self._own, "*"})
            case ast.Expr() | ast.Assign() | ast.AnnAssign():
                return _calls([one]) or any(isinstance(inner, ast.Lambda) for inner in ast.walk(one))
        return False

    def unrun(self, used: Collection[str]) -> str:
        """Why one of its tests would not run; empty where all may. ``used`` are the names that the tests use."""
        for function in self._functions:
            if function.name.startswith("test") and _returns_unrun(function):
                return f"{function.name} is async or yields, so nothing of it would run; write a plain function"
        for one in self._classes:
            methods = [
                inner
                for inner in one.body
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test")
            ]
            if methods and _is_plain(one) and one.name.startswith("Test") and one.name not in used:
                return f"{one.name} is no unittest.TestCase, so its tests would not run; derive it, or write functions"
            plain_case = one.bases and not one.decorator_list and all(ast.unparse(base) in _CASES for base in one.bases)
            for method in methods if plain_case else ():
                if _returns_unrun(method):
                    return (
                        f"{one.name}.{method.name} is async or yields, so nothing of it would run; derive the class"
                        " from unittest.IsolatedAsyncioTestCase, or write a plain method"
                    )
        return ""


def _run_at_import(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is loaded, those within others after them."""
    for one in statements:
        yield one
        if isinstance(one, ast.If) and _is_main(one.test):
            yield from _run_at_import(one.orelse)
        elif not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = [part for part in ast.iter_child_nodes(one) if isinstance(part, ast.stmt | ast.ExceptHandler)]
            for part in inner:
                yield from _run_at_import(part.body if isinstance(part, ast.ExceptHandler) else [part])


def _checks(one: ast.stmt) -> bool:
    """Whether a statement can fail for a wrong reply, apart from those within it."""
    if isinstance(one, ast.Assert):
        return not isinstance(one.test, ast.Tuple) and _names(one.test)
    if isinstance(one, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign) and _calls([one]):
        called = ast.unparse(one.value.func) if isinstance(one.value, ast.Call) else ""
        return called in _ENDS or called.partition(".")[0] not in _PREPARES
    return isinstance(one, ast.Raise)


def _is_plain(one: ast.ClassDef) -> bool:
    """A class that unittest does not know."""
    bases = [ast.unparse(base) for base in one.bases]
    return not one.decorator_list and not one.keywords and all(base == "object" for base in bases)


def _returns_unrun(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a call gives a coroutine or a generator, as far as no decorator changes that."""
    if function.decorator_list:
        return False
    return isinstance(function, ast.AsyncFunctionDef) or any(map(_yields, function.body))


def _yields(node: ast.AST) -> bool:
    if isinstance(node, ast.Yield | ast.YieldFrom):
        return True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda | ast.GeneratorExp):
        return False
    return any(map(_yields, ast.iter_child_nodes(node)))


def _is_test(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.startswith("test") and name.endswith(".py")


def _compiled(text: str, name: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise ValueError(f"{name} is no Python: {getattr(error, 'msg', error)}") from None
