from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from tests.support.waiting import until

from rookery.environments.sandbox.sandbox import (
    Isolation,
    Program,
    ProgramLimits,
    Sandbox,
    SandboxError,
    check_path,
    find,
)
from rookery.errors import UserError

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")

PROGRAMS, STARTS = 200, 20


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    running = Sandbox()
    yield running
    running.close()


def test_a_program_reads_and_writes(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("import sys\nprint(sum(map(int, sys.stdin)))\nsys.exit(3)", stdin="1\n2\n"))
    assert (result.status, result.code, result.stdout) == ("error", 3, "3\n")
    result = sandbox.run(Program("print(input('größe '))", stdin="né\U0001f600"))
    assert (result.status, result.stdout) == ("ok", "größe né\U0001f600\n")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def f(:", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = bytearray(300 << 20)", "MemoryError"),
        ("while True: pass", "the time limit ended it"),
        ("while True: print('x' * 1000)", "it wrote more than the limit"),
        ("import sys\nsys.exit('why')", "why"),
        ("x = '\\ud800'\nprint(x)\nraise ValueError(x)", "ValueError: ?"),
        ("code = 'null \\0 byte'\nexec('\\0')", "SyntaxError: source code string cannot contain null bytes"),
    ],
)  # fmt: skip
def test_a_failure_has_a_last_line(code: str, line: str, sandbox: Sandbox) -> None:
    result = sandbox.run(Program(code), ProgramLimits(seconds=0.2))
    assert result.status != "ok"
    assert result.last_line.startswith(line)


def test_asserts_are_counted_one_by_one(sandbox: Sandbox) -> None:
    checks = ["assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add(0, 0) == 0"]
    result = sandbox.run(Program("def add(a, b): return a + b", asserts=checks))
    assert (result.status, result.done, result.passed) == ("error", True, [True, False, True])
    assert sandbox.run(Program("def add(a, b): return a + b", asserts=checks[:1])).status == "ok"


def test_code_that_ends_the_process_before_its_checks_does_not_pass(sandbox: Sandbox) -> None:
    code = "import os\ndef add(a, b): return a + b\nos._exit(0)"
    result = sandbox.run(Program(code, asserts=["assert add(1, 2) == 3"]))
    assert (result.status, result.done, result.passed) == ("error", False, [])


@pytest.mark.parametrize("end", ["import sys\nsys.exit(0)", "raise SystemExit", "exit()"])
def test_code_that_exits_is_checked_all_the_same(end: str, sandbox: Sandbox) -> None:
    code = f"def add(a, b): return a + b\n{end}"
    result = sandbox.run(Program(code, asserts=["assert add(1, 2) == 3", "assert add(1, 2) == 4"]))
    assert (result.status, result.passed) == ("error", [True, False])


def test_an_end_within_the_checks_does_not_pass(sandbox: Sandbox) -> None:
    code = "import os\ndef add(a, b): os._exit(0)"
    result = sandbox.run(Program(code, asserts=["assert add(1, 2) == 3", "assert True"]))
    assert result.status == "error" and result.passed == []


def test_code_cannot_print_the_report_of_a_check(sandbox: Sandbox) -> None:
    code = 'import os\nos.write(3, b\'ran\\n{"check": 0, "passed": true}\\n{"done": true}\\n\')\nos._exit(0)'
    result = sandbox.run(Program(code, asserts=["assert False"]))
    assert result.status == "error" and result.passed == []


FORGED = """
import json, os
os.write(3, b"ran\\n")
secret = json.loads(open(4, "rb", closefd=False).read())["secret"].encode()
for text in TEXTS:
    os.write(3, secret + text.encode() + b"\\n")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("texts", "passed", "value"),
    [
        (['{"check": 99999999999, "passed": true}'], [], None),
        (['{"check": 10000, "passed": true}', '{"check": -1, "passed": true}'], [], None),
        (['{"check": 1, "passed": "yes"}', '{"check": true, "passed": true}'], [False, False], None),
        (['{"check": 1.0, "passed": true}', '{"check": "0"}', '{"check": [0]}', '{"check": 0}'], [False], None),
        (["no JSON", "", "3", "[]", "null", "\ud800", '{"value": 3}'], [], 3),
        (["[" * 100_000, '{"value": ' + "[" * 900 + "]" * 900 + "}"], [], None),
        (['{"value": ' + "1" * 5000 + "}", '{"value": [NaN, "\\ud800"]}'], [], "any"),
        (['{"done": "yes"}', '{"check": 0, "passed": true}'], [True], None),
    ],
)
def test_a_forged_report_is_read_as_untrusted_text(
    texts: list[str], passed: list[bool], value: object, sandbox: Sandbox
) -> None:
    """The confinement lives, and nothing is reported but checks with numbers, and a value."""
    code = FORGED.replace("TEXTS", repr(texts)).replace(".encode() + b", ".encode('utf-8', 'replace') + b")
    result = sandbox.run(Program(code, asserts=["assert False"]))
    assert (result.status, result.passed, result.done) == ("error", passed, False)
    assert value == "any" or result.value == value
    assert sandbox.run(Program("print(1)")).stdout == "1\n"


def test_the_largest_outputs_are_an_answer(sandbox: Sandbox) -> None:
    code = "import sys\nfor stream in (sys.stdout, sys.stderr): stream.write(chr(0) * (4 << 20))"
    result = sandbox.run(Program(code), ProgramLimits(seconds=10, output=4 << 20))
    assert result.status == "ok" and len(result.stdout) == len(result.stderr) == 4 << 20


def test_a_value_has_a_depth(sandbox: Sandbox) -> None:
    code = "def nested(depth): return [] if depth == 1 else [nested(depth - 1)]"
    assert sandbox.run(Program(code, call="nested", arguments=[100])).status == "ok"
    refused = sandbox.run(Program(code, call="nested", arguments=[101]))
    assert refused.status == "error" and "nested in more than 100 levels" in refused.last_line


def test_a_function_is_called_with_json(sandbox: Sandbox) -> None:
    code = "def grade(sample, item):\n    return {'score': len(sample['text']) / item}"
    assert sandbox.run(Program(code, call="grade", arguments=[{"text": "abcd"}, 8])).value == {"score": 0.5}
    missing = sandbox.run(Program("x = 1", call="grade", arguments=[]))
    assert missing.status == "error" and missing.last_line == "the code defines no function 'grade'"
    unspeakable = sandbox.run(Program("def grade(): return object()", call="grade"))
    assert unspeakable.status == "error" and "not JSON serializable" in unspeakable.last_line


def test_tests_of_a_project(sandbox: Sandbox) -> None:
    tests = {
        "tests/helper.py": "ONE = 1",
        "tests/test_add.py": (
            "import unittest\nfrom helper import ONE\nfrom package.add import add\n"
            "class Adds(unittest.TestCase):\n"
            "    def test_right(self): self.assertEqual(add(ONE, 2), 3)\n"
            "    @unittest.skip('later')\n    def test_skipped(self): pass\n"
            "def test_function(): assert add(1, 1) == 3\n"
        ),
        "tests/test_broken.py": "import missing",
    }
    result = sandbox.run(Program(None, files={"package/add.py": "def add(a, b): return a + b"}, tests=tests))
    assert sorted(result.passed) == [False, False, True]
    assert "ModuleNotFoundError" in result.stderr and "test_function" in result.stderr


def test_programs_do_not_see_each_other(sandbox: Sandbox) -> None:
    for code in ("import os\nos.makedirs('a/b/c')\nopen('a/b/c/file', 'w').write('left')\nos.chmod('a', 0)",
                 "import os\nfor n in range(3000): open(f'{n}', 'w').close()",
                 "import os\nfor n in range(100):\n    os.mkdir('d')\n    os.chdir('d')",
                 "import builtins\nbuiltins.print = None\nimport random\nrandom.random = None"):  # fmt: skip
        sandbox.run(Program(code))
        after = sandbox.run(Program("import os, random\nprint(os.listdir('.'), random.random() < 1)"))
        assert after.stdout == "[] True\n"


def test_a_prelude_is_imported_once(sandbox: Sandbox) -> None:
    other = Sandbox(prelude="import time\nbegan = time.monotonic()", confinements=1)
    try:
        seen = {other.run(Program("print(began)")).stdout for _ in range(3)}
        assert len(seen) == 1 and seen != {""}
    finally:
        other.close()


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a\0b", ".", "x" * 300])
def test_a_path_stays_inside(path: str, sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="no path inside the working directory"):
        check_path(path)
    with pytest.raises(ValueError, match="no path inside"):
        sandbox.run(Program("", files={path: ""}))


@pytest.mark.usefixtures("no_programs")
def test_a_machine_without_bubblewrap_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        find("bubblewrap")
    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        Sandbox().run(Program(""))


def test_a_confinement_that_cannot_start_is_one_line(sandbox: Sandbox) -> None:
    broken = Sandbox(prelude="raise RuntimeError('no such thing')")
    with pytest.raises(SandboxError, match="RuntimeError: no such thing"):
        broken.run(Program(""))
    broken.close()


def test_a_killed_confinement_is_replaced() -> None:
    before = set(psutil.Process().children(recursive=True))
    inside = lambda: set(psutil.Process().children(recursive=True)) - before  # noqa: E731
    running = Sandbox(confinements=1)
    running.run(Program("pass"))
    warm = inside()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(running.run, Program("import time\ntime.sleep(60)"))
        until(lambda: inside() - warm, "the program did not start")
        for process in warm:
            with suppress(psutil.NoSuchProcess):  # the first takes the others with it
                process.kill()
        with pytest.raises(SandboxError, match="the sandbox ended"):
            future.result()
    assert running.run(Program("print(1)")).stdout == "1\n"
    running.close()


@pytest.mark.skipif(shutil.which("runsc") is None, reason="needs gVisor: apt-get install runsc")
@pytest.mark.heavy
def test_gvisor_confines_alike() -> None:
    isolation: Isolation = "gvisor"
    running = Sandbox(isolation, confinements=1)
    try:
        assert running.run(Program("import platform\nprint(6 * 7)")).stdout == "42\n"
        for code in ("import os\nos.fork()", "import socket\nsocket.socket()", "open('/etc/passwd')",
                     "while True: pass", "x = bytearray(400 << 20)"):  # fmt: skip
            assert running.run(Program(code)).status != "ok"
    finally:
        running.close()


def computed() -> float:
    """Processor time of this process, its children and theirs so far, in seconds."""
    found = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended: its parent has its time
            found += sum(process.cpu_times()[:4])
    return found


@pytest.mark.heavy
def test_a_program_takes_less_than_the_start_of_an_interpreter() -> None:
    """In processor time, which neither other work on the machine nor its speed changes: a warm process forks it."""
    running = Sandbox(confinements=1)
    running.run(Program("pass"))
    before = computed()
    for _ in range(PROGRAMS):
        running.run(Program("print(1)"))
    program = (computed() - before) / PROGRAMS
    running.close()
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    for _ in range(STARTS):
        subprocess.run([sys.executable, "-I", "-c", "print(1)"], check=True, stdout=subprocess.DEVNULL)
    start = (sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before) / STARTS
    print(f"a program {1000 * program:.1f} ms, the start of an interpreter {1000 * start:.1f} ms")
    assert program < start


def test_a_sandbox_outlives_the_thread_that_started_it() -> None:
    running = Sandbox(confinements=1)
    thread = threading.Thread(target=lambda: running.run(Program("pass")))
    thread.start()
    thread.join()
    assert running.run(Program("print(1)")).stdout == "1\n"
    running.close()
