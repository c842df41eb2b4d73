from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rookery.environments.builtins import find
from rookery.environments.checks import EnvironmentChecks
from rookery.environments.sandbox.rows import code_of, task_of
from rookery.environments.verifiers.verifiers import Code
from rookery.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")

ADD = "def add(a, b):\n    return a + b"
FENCED = f"Here:\n```python\n{ADD}\n```\nDone."
TESTS = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
CASES = {"cases": [{"stdin": "2\n3\n", "stdout": "5"}, {"stdin": "0\n0\n", "stdout": "0\n"}]}
PROJECT = {
    "file": "shop/cart.py",
    "files": {
        "shop/__init__.py": "",
        "shop/prices.py": "PRICES = {'egg': 2}",
        "tests/test_cart.py": (
            "from shop.cart import total\nfrom shop.prices import PRICES\n"
            "def test_total(): assert total(['egg', 'egg']) == 2 * PRICES['egg']\n"
            "def test_empty(): assert total([]) == 0"
        ),
    },
}
UNITS = {
    "files": {
        "test_add.py": (
            "import unittest\nfrom solution import add\n"
            "class Adds(unittest.TestCase):\n"
            "    def test_one(self): self.assertEqual(add(1, 2), 3)\n"
            "    def test_two(self):\n"
            "        for n in (0, 1):\n"
            "            with self.subTest(n=n): self.assertEqual(add(n, n), 2 * n)\n"
        )
    }
}
SCRIPT = {"files": {"test_add.py": "import solution\nfor n in range(3):\n    assert solution.add(n, 1) == n + 1\n"}}
ENDS = ["sys.exit(0)", "sys.exit()", "sys.exit(False)", "exit()", "quit(0)", "raise SystemExit",
        "raise SystemExit(None)", "os._exit(0)", "raise unittest.SkipTest('later')", "raise KeyboardInterrupt",
        "raise GeneratorExit", "raise StopIteration", "raise StopAsyncIteration", "os.close(3)",
        "argparse.ArgumentParser(prog='x').parse_args(['--help'])",
        "threading.Thread(target=sys.exit).run()"]  # fmt: skip
"""Ends of a function that gives no value."""


@pytest.fixture(scope="module")
def code() -> Iterator[Code]:
    yield Code()


@pytest.mark.parametrize(
    ("row", "reply", "right", "passed"),
    [
        (TESTS, FENCED, 1.0, 1.0),
        (TESTS, ADD, 1.0, 1.0),
        (TESTS, FENCED.replace("a + b", "abs(a) + b"), 0.0, 0.5),
        (TESTS, "I cannot do that.", 0.0, 0.0),
        (TESTS, f"{FENCED}\n```python\nimport os\nos._exit(0)\n```", 0.0, 0.0),
        ({"tests": "\n".join(TESTS["tests"])}, FENCED, 1.0, 1.0),
        (CASES, "```\nprint(int(input()) + int(input()))\n```", 1.0, 1.0),
        (CASES, "print('5   ')\nprint()", 0.0, 0.5),
        (CASES, "print(0)", 0.0, 0.5),
        ({"cases": [{"stdout": "a\r\nb\n"}]}, "print('a  ')\nprint('b')", 1.0, 1.0),
        ({"cases": [{"stdout": "a\nb"}]}, r"print('a\x0bb')", 0.0, 0.0),
        ({"cases": [{"stdout": "a\nb"}]}, r"print('a\u2028b')", 0.0, 0.0),
        ({"cases": [{"stdout": "a\nb"}]}, r"print('a\rb')", 0.0, 0.0),
        (CASES, "print(int(input()) + int(input()))\nraise SystemExit(1)", 0.0, 0.0),
        (
            PROJECT,
            "from shop.prices import PRICES\ndef total(items):\n    return sum(PRICES[item] for item in items)",
            1.0,
            1.0,
        ),
        (PROJECT, "def total(items):\n    return 4", 0.0, 0.5),
        (PROJECT, "import sys\nsys.exit(0)", 0.0, 0.0),
    ],
)
def test_code_is_scored_by_its_checks(row: dict[str, Any], reply: str, right: float, passed: float, code: Code) -> None:
    reward, metrics = code.score(reply, row)
    assert (reward, metrics) == (right, {"right": right, "passed": passed, "timed_out": 0.0})


@pytest.mark.parametrize("row", [TESTS, UNITS, SCRIPT, {"tests": "try:\n    add(1, 2)\nfinally:\n    x = 1"}])
@pytest.mark.parametrize("end", ENDS)
def test_code_that_ends_within_a_check_fails_it(row: dict[str, Any], end: str, code: Code) -> None:
    start = "import argparse, os, sys, threading, unittest\n"
    for body in (f"    {end}", f"    if a == 0 or b == 2:\n        {end}\n    return a + b"):
        reward, metrics = code.score(f"{start}def add(a, b):\n{body}", row)
        assert reward == metrics["right"] == 0.0 and metrics["passed"] < 1.0


@pytest.mark.parametrize("reply", ["exit", "quit", "sys.exit", "lambda *both: sys.exit(0)"])
def test_a_name_of_an_exit_passes_no_check(reply: str, code: Code) -> None:
    assert code.score(f"import sys\nsame = {reply}", {"tests": ["assert same(0) == 0"]})[0] == 0.0


@pytest.mark.parametrize(
    ("text", "right", "passed"),
    [
        ("def test_a(): assert add(1, 2) == 3", 1.0, 1.0),
        ("assert add(1, 2) == 3", 1.0, 1.0),
        ("def check(): assert add(1, 2) == 3\ncheck()", 1.0, 1.0),
        ("if add(1, 2) != 3:\n    raise ValueError", 1.0, 1.0),
        ("import sys\nif add(1, 2) != 3:\n    sys.exit(1)", 1.0, 1.0),
        ("import sys\nif add(1, 2) != 4:\n    sys.exit(1)", 0.0, 0.0),
        ("def check(): assert add(1, 2) == 3\n_ = check()", 1.0, 1.0),
        ("def check(x): assert add(x, 2) == x + 2\n[check(x) for x in range(3)]", 1.0, 1.0),
        ("test_a = lambda: unittest.TestCase().assertEqual(add(1, 2), 3)", 1.0, 1.0),
        ("class A(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): assert add(1, 2) == 3", 1.0, 1.0),
        ("class A(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): assert add(1, 2) == 4", 0.0, 0.0),
        ("class A(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self): assert add(1, 2) == 4", 1.0,
         1.0),
        ("class A(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self): assert add(1, 2) == 3", 0.0,
         0.0),
        ("class A(unittest.TestCase):\n    @unittest.skip('x')\n    def test_a(self): add()\n"
         "def test_b(): assert add(1, 2) == 3", 1.0, 1.0),
        ("class A(unittest.TestCase):\n    def test_a(self): self.skipTest('x')", 0.0, 0.0),
        ("class A(unittest.TestCase):\n    @unittest.skip('x')\n    def test_a(self): pass", 0.0, 0.0),
        ("class A(unittest.TestCase):\n    def test_a(self):\n        with self.subTest(): self.skipTest('x')\n"
         "        with self.subTest(): assert add(1, 2) == 4", 0.0, 0.0),
        ("class A(unittest.TestCase):\n    def test_a(self):\n        with self.subTest(): self.skipTest('x')\n"
         "        with self.subTest(): assert add(1, 2) == 3", 1.0, 1.0),
        ("class B(unittest.TestCase): pass\nclass A(B):\n    async def test_a(self): assert False", 0.0, 0.0),
        ("class B(unittest.TestCase): pass\nclass A(B):\n    def test_a(self):\n        yield add()", 0.0, 0.0),
        ("class A(Exception): pass", 0.0, 0.0),
        ("import sys\nsys.path.insert(0, '.')", 0.0, 0.0),
        ("if __name__ == '__main__':\n    unittest.main()\nclass A(unittest.TestCase):\n"
         "    def test_a(self): assert add(1, 2) == 3", 1.0, 1.0),
    ],
)  # fmt: skip
def test_a_project_is_right_where_a_test_of_it_passed(text: str, right: float, passed: float, code: Code) -> None:
    row = {"files": {"test_add.py": f"import unittest\nfrom solution import add\n{text}"}}
    _, metrics = code.score(ADD, row)
    assert (metrics["right"], metrics["passed"]) == (right, passed)


def test_partial_reward_and_the_limits() -> None:
    code = Code.model_validate({"partial": True, "seconds": 0.2, "right": 2.0, "wrong": 0.5})
    assert code.score(FENCED.replace("a + b", "abs(a) + b"), TESTS)[0] == pytest.approx(0.5 + 1.5 * 0.5)
    reward, metrics = code.score("def add(a, b):\n    while True: pass", TESTS)
    assert reward == 0.5 and metrics["timed_out"] == 1.0
    assert Code.model_validate({"right": 0.1, "wrong": -0.3}).score(FENCED, TESTS)[0] == 0.1, "without rounding"


def test_forged_checks_earn_no_more_than_all() -> None:
    code = (
        "import json, os\nos.write(3, b'ran\\n')\n"
        "secret = json.loads(open(4, 'rb', closefd=False).read())['secret']\n"
        "for number in range(50):\n"
        "    os.write(3, (secret + json.dumps({'check': number, 'passed': True}) + '\\n').encode())\n"
        "os._exit(1)"
    )
    reward, metrics = Code.model_validate({"partial": True}).score(code, TESTS)
    assert (reward, metrics["passed"], metrics["right"]) == (1.0, 1.0, 0.0)


PYTEST = "from solution import add\nclass TestAdd:\n    def test_sum(self):\n        assert add(1, 2) == 3"
ASYNC = "from unittest import TestCase\nclass A(TestCase):\n    async def test_a(self):\n        assert f()"


@pytest.mark.parametrize("reply", ["", "\0", "\ud800", "```python", "(" * 10_000, "```python\n\ud800\n```", "é" * 5000])
def test_no_reply_makes_it_raise(reply: str, code: Code) -> None:
    assert code.score(reply, TESTS)[0] == 0.0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": 1}, "the row has no tests, cases or files to check code with, but 'answer'; give one of them"),
        ({}, "but nothing"),
        ({"tests": "assert x", "cases": []}, "the row has tests and cases; give one of them"),
        ({"tests": []}, "tests is []; give a text, or a list of 1 to 100 texts"),
        ({"tests": ["assert x"] * 101}, "tests is"),
        ({"tests": {"a": 1}}, "tests is"),
        ({"tests": ["assert x", " "]}, 'tests.1 is " "; give Python that raises'),
        ({"tests": ["assert x", 3]}, "tests.1 is 3"),
        ({"tests": "assert add(1, 2 == 3"}, "tests is no Python: '(' was never closed"),
        ({"tests": "x = '\0'"}, "tests is no Python"),
        ({"tests": "(" * 5000}, "tests is no Python"),
        ({"tests": "def check(candidate):\n    assert candidate(2) == 3"}, "tests checks nothing"),
        ({"tests": "class T:\n    def test(self):\n        assert f(1) == 2"}, "tests checks nothing"),
        ({"tests": "import math\nLIMIT = 3"}, "tests checks nothing"),
        ({"tests": "assert (f(1) == 3, 'wrong')"}, "tests checks nothing"),
        ({"tests": "assert True"}, "tests checks nothing"),
        ({"tests": "pass"}, "tests checks nothing"),
        ({"tests": "assert 1 + 1 == 2"}, "tests checks nothing"),
        ({"tests": "def check():\n    assert f(1)\nif __name__ == '__main__':\n    check()"}, "tests checks nothing"),
        ({"tests": "async def check():\n    assert f(1)\ncheck()"}, "tests checks nothing"),
        ({"tests": "def check():\n    assert f(1)\n    yield\ncheck()"}, "tests checks nothing"),
        ({"tests": "lambda: f(1)"}, "tests checks nothing"),
        ({"tests": "check = lambda: f(1)"}, "tests checks nothing"),
        ({"tests": "all(f(x) == 1 for x in (1, 2))"}, "tests compares without assert"),
        ({"tests": "assert f(1) == 2\nsys.exit(0)"}, "tests calls sys.exit, which is no check here"),
        ({"tests": "assert f(1) == 2\nraise SystemExit"}, "tests calls SystemExit"),
        ({"tests": ["assert f(1) == 2", "exit()"]}, "tests.1 calls exit"),
        (
            {"tests": "try:\n    assert f(1) == 2\n    sys.exit(0)\nexcept AssertionError:\n    sys.exit(1)"},
            "tests calls sys.exit, which is no check here",
        ),
        ({"tests": "if f(1) == 2:\n    raise SystemExit\nelse:\n    exit(1)"}, "tests calls SystemExit"),
        ({"tests": "import unittest\nclass T(unittest.TestCase):\n    pass\nunittest.main()"}, "calls unittest.main"),
        ({"tests": "# later"}, "tests checks nothing"),
        ({"tests": "f(1) == 2"}, "tests compares without assert"),
        ({"tests": ["assert f(1) == 2", "not f(2)"]}, "tests.1 compares without assert"),
        ({"cases": [{"stdin": "1"}]}, 'cases.0 is {"stdin": "1"}'),
        ({"cases": [{"stdout": 1}]}, "cases.0 is"),
        ({"cases": [{"stdin": "1", "stdout": "\n"}]}, "a program that writes nothing passes it"),
        ({"cases": {}}, "cases is {}"),
        ({"files": {"a.py": "x = 1"}}, 'files has no tests, but ["a.py"]; give some in files named test….py'),
        ({"files": {"test_a.py": "x = 1"}}, 'files has no test in ["test_a.py"], so every reply would be right'),
        ({"files": {"test_a.py": ""}}, "files has no test"),
        ({"files": {"test_a.py": "import solution\ndef check():\n    assert solution.f()"}}, "files has no test"),
        ({"files": {"test_a.py": "from solution import f\nif __name__ == '__main__':\n    assert f()"}}, "has no test"),
        ({"files": {"test_a.py": "assert 1"}}, "files has no test"),
        ({"files": {"test_a.py": "class Cases:\n    def check(self):\n        assert f()"}}, "files has no test"),
        ({"files": {"test_a.py": PYTEST}}, "files.test_a.py: TestAdd is no unittest.TestCase, so its tests would not"),
        ({"files": {"test_a.py": f"{PYTEST}\ndef test_more():\n    assert f()"}}, "TestAdd is no unittest.TestCase"),
        ({"files": {"test_a.py": "async def test_a():\n    assert f()"}}, "test_a is async or yields"),
        ({"files": {"test_a.py": "def test_a():\n    yield f()"}}, "test_a is async or yields"),
        ({"files": {"test_a.py": ASYNC}}, "A.test_a is async or yields"),
        ({"files": {"../test_a.py": "x = 1"}}, "is no path inside the working directory"),
        ({"files": {"test_a.py": "x = 1"}, "file": "/etc/passwd"}, "is no path inside the working directory"),
        ({"files": {"test_a.py": "x = 1"}, "file": "test_a.py"}, "which is one of the tests"),
        ({"files": {"test_a.py": "x ="}}, "files.test_a.py is no Python"),
        ({"files": {"test_a.py": 3}}, "give texts by their path"),
        ({"files": []}, "files is []"),
    ],
)
def test_a_row_without_usable_checks_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        task_of(row)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "tests",
    [
        "assert f(1) == 2",
        ["import math", "assert f(1) == math.pi"],
        "def check(candidate):\n    assert candidate(2) == 3\n\ncheck(f)",
        "for x in range(3):\n    assert f(x)",
        "try:\n    f(-1)\nexcept ValueError:\n    pass",
        "found = f(1)",
        "class T:\n    assert f(1) == 2",
        "@run\ndef test():\n    assert f(1) == 2",
        "def test(given=f(1)):\n    pass",
        "if __name__ == '__main__':\n    pass\nelse:\n    assert f(1)",
        "import asyncio\nasync def check():\n    assert f(1)\nasyncio.run(check())",
        "if f(1) != 2:\n    sys.exit(1)",
        "assert all(f(x) == 1 for x in (1, 2))",
        "list(map(lambda x: f(x), (1, 2)))",
    ],
)
def test_tests_that_can_fail_are_taken(tests: Any) -> None:
    assert task_of({"tests": tests}).tests


@pytest.mark.parametrize(
    "text",
    [
        "def test_a(): pass",
        "if True:\n    def test_a(): pass",
        "try:\n    import numpy\nexcept ImportError:\n    def test_a(): pass",
        "@decorated\nasync def test_a(): pass",
        "class TestMixin:\n    def test_a(self): pass\nclass A(TestMixin, unittest.TestCase): pass",
        "class TestAdd:\n    def test_a(self): pass\nTestAdd().test_a()",
        "class TestData:\n    rows = []\ndef test_a(): pass",
        "class A(Base): pass",
        "class A(unittest.IsolatedAsyncioTestCase):\n    async def test_a(self): pass",
        "from cases import *",
        "from cases import Adds",
        "from tests.cases import Adds",
        "from . import cases",
        "test_a = make(f)",
        "globals()['test_a'] = f",
        "def load_tests(loader, tests, pattern): return tests",
        "with open('rows') as rows:\n    for row in rows:\n        assert f(row)",
    ],
)
def test_projects_that_may_test_are_taken(text: str) -> None:
    assert task_of({"files": {"test_a.py": text, "tests/cases.py": ""}}).project_tests


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("~~~py\nx = 1\n~~~", "x = 1\n"),
        ("````python\n```\n````", "```\n"),
        ("```python\nx = 1\n```\n```bash\npip install y\n```", "x = 1\n"),
        ("```\nx = 1\n```\nbetter:\n```Python\nx = 2\n```", "x = 2\n"),
        ("```Python3.11\nx = 2\n```\n```\n2\n```", "x = 2\n"),
        ("```ipython3\nx = 2\n```\n```pytb\n2\n```", "x = 2\n"),
        ("```python\nx = 1", "x = 1"),
        ("```js\nlet x\n```", "```js\nlet x\n```"),
        ("inline ```x``` only", "inline ```x``` only"),
        ("```python x = 1``` is it", "```python x = 1``` is it"),
        ("```python x = 1```\nhello", "```python x = 1```\nhello"),
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```\n", "x = 1\n"),
        ("```\nx = 1\n```\nOutput:\n```text\n1\n```\n", "x = 1\n"),
        ("1. Do:\n\n   ```python\n   if x:\n       y = 1\n\n   z\n   ```\n", "if x:\n    y = 1\n\nz\n"),
        ("```python\r\nx = 1\r\n```\r\nIt is one.\r\n", "x = 1\r\n"),
        ("Here is the code: ```python\nx = 1\n```", "x = 1\n"),
        ("Answer:```py\nx = 1\n```\nDone.", "x = 1\n"),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1\n"),
        ("```python\nx = 1\n```</answer>", "x = 1\n"),
        ("```python\nx = 1\n``` as above", "x = 1\n"),
        ("```python\nx = 1```", "x = 1"),
        ("```python\nx = 1```\nIt is one.", "x = 1"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 2\n"),
        ("> ```python\n> if x:\n>     y = 1\n> ```\nIt is one.", "if x:\n    y = 1\n"),
        ("- ```python\n  x = 1\n  ```", "x = 1\n"),
        ('```python\nf = """\n    ```\n    1\n    ```\n"""\n```', 'f = """\n    ```\n    1\n    ```\n"""\n'),
        ("```python\nx = 1\n     ```\nIt is one.", "x = 1\n     "),
        ("`` ```python `` opens one", "`` ```python `` opens one"),
        ("Not ```js\nlet x\n``` here", "Not ```js\nlet x\n``` here"),
    ],
)
def test_the_code_of_a_reply(reply: str, found: str) -> None:
    assert code_of(reply) == found


@pytest.mark.parametrize(
    "text",
    ["`" * 200_000, "```" + "\t" * 200_000, "```" + "a" * 200_000, "```\n" * 50_000, "a" + " " * 200_000,
     "a```python\nx```\n" * 12_000, "a ``" * 50_000, "> " * 100_000],
)  # fmt: skip
def test_the_code_of_a_reply_is_found_in_linear_time(text: str) -> None:
    began = time.thread_time()
    code_of(text)
    assert time.thread_time() - began < 2  # quadratic time takes a minute


def test_rows_are_checked_when_a_job_is_submitted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "Write add.", **TESTS}, {"prompt": "Write it."}]
    path.write_text("\n".join(map(json.dumps, rows)))
    checks = EnvironmentChecks()
    try:
        with pytest.raises(UserError, match=r"line 2: the row has no tests, cases or files .* \(verifier sandbox\)"):
            checks.validate("jsonl", {"path": str(path), "verifier": "sandbox"})
        path.write_text(json.dumps(rows[0]))
        assert (
            checks.validate("jsonl", {"path": str(path), "verifier": {"name": "sandbox", "partial": True}}).train == 1
        )
    finally:
        checks.close()


@pytest.mark.usefixtures("no_programs")
def test_a_machine_without_a_sandbox_refuses_the_job() -> None:
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        find("jsonl").validate_options({"rows": [{"prompt": "Write add.", **TESTS}], "verifier": "sandbox"})


def test_the_shipped_programs_are_accepted_and_documented() -> None:
    examples = Path(__file__).parents[3] / "examples"
    rows = [json.loads(line) for line in (examples / "programs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(task_of(row) for row in rows) and len({row["prompt"] for row in rows}) == len(rows) == 40
    page = (examples.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    assert (examples / "programs.yaml").read_text(encoding="utf-8") in page
