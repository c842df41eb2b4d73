"""The first process inside a confinement: it imports once and forks one process per program.

:mod:`rookery.environments.sandbox.sandbox` passes this file's text to an interpreter in the confinement, with its
configuration as the only argument, so it imports the standard library alone. Standard input has pairs of frames, each
of four bytes of length and JSON: a program, then the checks of it. Standard output has ``{"ready": true}`` and one
frame per program. The checks are read from standard input after the program has reported that its code has run, so that
code which finds its checks has to ask for them as this file does.

The checks, and the secret that marks their reports, come into the process that ran the code. The confinement protects
the machine and other programs, not the result: code that takes the part of this file in its process reads the checks
and reports what it likes. This process takes a report for a stranger's text (:func:`reported`), bounds its address
space, and computes no result but the one of that program.

A program runs in a separate process with limits of memory, files, processes and processor time, and under a seccomp
filter that allows no further process, no program, no socket, and no signal to another process. This process kills it
when its processor time, its time by the clock or its output exceeds the limit. The only writable folder is emptied
after every program; where that takes long, this process ends, and the folder with it.
"""

from __future__ import annotations

import builtins
import ctypes
import inspect
import json
import linecache
import math
import mmap
import os
import resource
import secrets
import select
import signal
import sys
import threading
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

BOX = "/box"
"""The only writable folder."""

BEAT, SHORT_BEAT = 0.02, 0.001
"""Seconds between two looks at a running program, and at one that has closed its output."""

SLACK = 2
"""The kernel's limit of processor time, in multiples of the program's: this process measures and kills; the kernel's
counts whole ticks, of which a busy machine gives more than the program has used."""

WALL = 5.0
"""Time by the clock that a program may take, in multiples of its processor time, plus a second."""

DESCRIPTORS, PROCESSES = 64, 64
"""Most open files of a program, and most threads."""

REPORT = 1 << 20
"""Most bytes of a program's report."""

MOST_REPORTED = 10_000
"""Most checks of a program whose results are reported."""

DEEPEST_VALUE = 100
"""Most levels of a called function's value: every reader of JSON has its own limit."""

OWN_MEMORY = 512 << 20
"""Bytes of address space that this process may take in addition to those that it has when it is warm: the largest
outputs take a third, and a separate thread up to 136 MB."""

MOST_LEFT, DEEPEST_LEFT = 2000, 40
"""Files that a program may leave behind, and the depth of its folders, that are removed one by one."""

NO_NEW_PRIVILEGES, SECCOMP, SECCOMP_FILTER, DUMPABLE = 38, 22, 2, 4
"""Numbers of ``prctl``."""

WARM = ("ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
        "heapq", "io", "itertools", "operator", "random", "re", "statistics", "string", "typing")  # fmt: skip
"""Modules that programs use often."""


class SeccompFilter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def main() -> None:
    configuration = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    os.nice(configuration["niceness"])
    if configuration["uid"]:
        os.setgroups([])
        os.setgid(configuration["uid"])
        os.setuid(configuration["uid"])
    libc.prctl(DUMPABLE, 0, 0, 0, 0)
    os.umask(0o077)
    os.environ.clear()
    os.environ.update({"HOME": BOX, "TMPDIR": BOX, "PATH": "/usr/bin", "LANG": "C.UTF-8"})
    os.chdir(BOX)
    sys.path += configuration["paths"]
    sys.dont_write_bytecode = True
    for name in WARM:
        __import__(name)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which `site` defines elsewhere
    namespace: dict[str, Any] = {}
    exec(compile(configuration["prelude"], "<prelude>", "exec"), namespace)
    lines = bytes.fromhex(configuration["filter"])
    seccomp = SeccompFilter(len(lines) // 8, lines)
    source, sink = os.dup(0), os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    write(sink, {"ready": True})
    base = size()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (base + OWN_MEMORY, hard))
    while (program := read(source)) is not None:
        ran = ProgramRun(program, source, base)
        result = ran.result(lambda job, ends: child(job, ends, namespace, libc, seccomp))
        clean = emptied(BOX)
        write(sink, {"result": result, "clean": clean})
        if not clean:
            return


def read_exactly(descriptor: int, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = os.read(descriptor, count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def read(descriptor: int) -> Any:
    head = read_exactly(descriptor, 4)
    body = head and read_exactly(descriptor, int.from_bytes(head, "big"))
    return json.loads(body) if body else None


def write(descriptor: int, message: Mapping[str, Any]) -> None:
    body = json.dumps(message).encode()
    frame = memoryview(len(body).to_bytes(4, "big") + body)
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def size() -> int:
    """The bytes of this process's address space, which is the least limit under which one more page fits: there is no
    /proc to read it from."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    least, most = 0, 1 << 46
    while most - least > mmap.PAGESIZE:
        middle = (least + most) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, hard))
        try:
            mmap.mmap(-1, mmap.PAGESIZE).close()
            most = middle
        except (OSError, MemoryError):
            least = middle
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return most


def emptied(folder: str) -> bool:
    """Whether everything in ``folder`` was removed."""
    left, found = [folder], 0
    folders: list[str] = []
    try:
        while left:
            current = left.pop()
            if current != folder:
                os.chmod(current, 0o700)
            for entry in os.scandir(current):
                found += 1
                if found > MOST_LEFT or entry.path.count("/") > DEEPEST_LEFT:
                    return False
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                    folders.append(entry.path)
                else:
                    os.unlink(entry.path)
        for path in reversed(folders):
            os.rmdir(path)
    except OSError:
        return False
    return True


class ProgramRun:
    """One program, seen from the process that forked it."""

    def __init__(self, program: dict[str, Any], source: int, base: int) -> None:
        self.program, self.source = program, source
        self.program["address_space"] = base + program["memory"]
        self.secret = secrets.token_hex(16)
        self.texts = {"stdout": bytearray(), "stderr": bytearray(), "report": bytearray()}
        self.most = {"stdout": program["output"], "stderr": program["output"], "report": REPORT}
        self.status = ""
        self.checks: dict[str, Any] | None = None
        self.answer_end: int | None = None
        self.open: dict[int, str] = {}
        self.pid = 0

    def result(self, run: Callable[[dict[str, Any], list[int]], NoReturn]) -> dict[str, Any]:
        ends = {name: os.pipe() for name in ("stdout", "stderr", "report", "checks")}
        stdin = os.memfd_create("stdin")
        os.write(stdin, self.program["stdin"].encode("utf-8", "replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            try:
                run(self.program, [stdin, ends["stdout"][1], ends["stderr"][1], ends["report"][1], ends["checks"][0]])
            finally:
                os._exit(70)
        os.close(stdin)
        for name in ("stdout", "stderr", "report"):
            os.close(ends[name][1])
            os.set_blocking(ends[name][0], False)
        os.close(ends["checks"][0])
        self.answer_end = ends["checks"][1]
        self.open = {ends[name][0]: name for name in ("stdout", "stderr", "report")}
        code, usage = self.follow(began)
        for descriptor in list(self.open):
            self.take(descriptor)
        for name in ("stdout", "stderr", "report"):
            os.close(ends[name][0])
        if self.answer_end is not None:
            os.close(self.answer_end)
        if self.checks is None and read(self.source) is None:  # of a program that ended before it came to them
            os._exit(0)
        return self.described(code, usage, time.monotonic() - began)

    def follow(self, began: float) -> tuple[int, resource.struct_rusage]:
        """Waits for the program's end, and causes it at a limit."""
        poll = select.poll()
        poll.register(self.source, 0)  # its writer's end is reported
        for descriptor in self.open:
            poll.register(descriptor, select.POLLIN)
        seconds = self.program["seconds"]
        clock = (~self.pid << 3) | 2  # the processor time of another process
        until = began + WALL * seconds + 1.0
        while True:
            for descriptor, event in poll.poll(1000 * (BEAT if self.open else SHORT_BEAT)):
                if descriptor == self.source:
                    if event & (select.POLLHUP | select.POLLERR):
                        os.kill(self.pid, signal.SIGKILL)
                        os._exit(0)
                elif not self.take(descriptor):
                    poll.unregister(descriptor)
                    del self.open[descriptor]
            if self.answer_end is not None and self.texts["report"].startswith(b"ran\n"):
                self.checks = read(self.source)
                if self.checks is None:
                    os.kill(self.pid, signal.SIGKILL)
                    os._exit(0)
                self.send_checks()
            ended, status, usage = os.wait4(self.pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), usage
            if not self.status and any(len(text) > self.most[name] for name, text in self.texts.items()):
                self.kill("output")
            if not self.status and (time.monotonic() > until or self.used(clock) > seconds):
                self.kill("time")

    def send_checks(self) -> None:
        """The program reads nothing else, and a checker that never reads is stopped by its limits."""
        assert self.answer_end is not None and self.checks is not None
        descriptor, self.answer_end = self.answer_end, None
        body = json.dumps({**self.checks, "secret": self.secret}).encode()

        def send() -> None:
            with open(descriptor, "wb", buffering=0) as end:
                rest = memoryview(body)
                try:
                    while rest:
                        rest = rest[end.write(rest) :]
                except OSError:
                    pass

        threading.Thread(target=send, daemon=True).start()

    def used(self, clock: int) -> float:
        try:
            return time.clock_gettime(clock)
        except OSError:  # it has just ended
            return 0.0

    def kill(self, status: str) -> None:
        self.status = status
        os.kill(self.pid, signal.SIGKILL)

    def take(self, descriptor: int) -> bool:
        """Whether more may come."""
        name = self.open[descriptor]
        while len(self.texts[name]) <= self.most[name]:
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
            if not part:
                return False
            self.texts[name] += part
        return True

    def described(self, code: int, usage: resource.struct_rusage, elapsed: float) -> dict[str, Any]:
        passed, value, done = reported(bytes(self.texts["report"]), self.secret.encode())
        seconds = usage.ru_utime + usage.ru_stime
        spent = code == -signal.SIGKILL and seconds >= self.program["seconds"]  # the kernel was first
        status = self.status or ("time" if code == -signal.SIGXCPU or spent else "signal" if code < 0 else "")
        status = status or ("error" if code else "ok")
        return {
            "status": status,
            "code": code,
            "stdout": self.texts["stdout"][: self.most["stdout"]].decode("utf-8", "replace"),
            "stderr": self.texts["stderr"][: self.most["stderr"]].decode("utf-8", "replace"),
            "passed": passed,
            "done": done,
            "value": value,
            "seconds": seconds,
            "elapsed": elapsed,
        }


def reported(report: bytes, secret: bytes) -> tuple[list[bool], Any, bool]:
    """The report in the lines that begin with ``secret``: which checks passed, in order, the value of the called
    function, and whether all checks came to their end. The program may have written any of them."""
    passed: dict[int, bool] = {}
    value, done = None, False
    for line in report.split(b"\n"):
        if not line.startswith(secret):
            continue
        try:
            found = json.loads(line[len(secret) :])
        except (ValueError, RecursionError):
            continue
        if not isinstance(found, dict):
            continue
        number = found.get("check")
        if type(number) is int and 0 <= number < MOST_REPORTED:
            passed[number] = found.get("passed") is True
        if "value" in found and depth(found["value"]) <= DEEPEST_VALUE:
            value = found["value"]
        done = done or found.get("done") is True
    return [passed.get(number, False) for number in range(max(passed, default=-1) + 1)], value, done


def depth(value: Any) -> int:
    """How many lists and objects stand within one another in a value of JSON; one more than the limit for any more."""
    levels, row = 0, [value]
    while levels <= DEEPEST_VALUE:
        within = [one for one in row if isinstance(one, (dict, list))]
        if not within:
            break
        row = [inner for one in within for inner in (one.values() if isinstance(one, dict) else one)]
        levels += 1
    return levels


def child(
    job: dict[str, Any], ends: Sequence[int], namespace: dict[str, Any], libc: ctypes.CDLL, seccomp: SeccompFilter
) -> NoReturn:
    """Runs one program; never returns."""
    for number, descriptor in enumerate(ends):  # no number here is in the way of another: each is above the five
        os.dup2(descriptor, 100 + number)
    for number in range(len(ends)):
        os.dup2(100 + number, number)
    os.closerange(len(ends), 256)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        opened = open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    limits = {
        resource.RLIMIT_AS: job["address_space"],
        resource.RLIMIT_FSIZE: job["files_bytes"],
        resource.RLIMIT_NOFILE: DESCRIPTORS,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_CPU: SLACK * math.ceil(job["seconds"]) + 1,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, SECCOMP_FILTER, ctypes.byref(seccomp), 0, 0):
        os._exit(71)
    sys.argv = [job["path"]]
    sys.path.insert(0, BOX)
    code = 1
    try:
        code = played(job, namespace)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                code = code or 1
        os._exit(code)


def played(job: dict[str, Any], namespace: dict[str, Any]) -> int:
    """The exit code of a program and its checks."""
    for path, text in job["files"].items():
        write_file(path, text)
    module = ModuleType(job["module"])
    module.__dict__.update({name: value for name, value in namespace.items() if not name.startswith("__")})
    module.__file__ = f"{BOX}/{job['path']}"
    sys.modules[job["module"]] = module
    if job["code"] is not None:
        code = guarded(job["code"], job["path"], module.__dict__)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        if code or not job["checked"]:
            return code
    os.write(3, b"ran\n")
    with open(4, "rb", closefd=False) as end:
        checks = json.loads(end.read())
    return checked(checks, module.__dict__, os.path.join(BOX, job["path"]))


def write_file(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(os.path.join(BOX, path)), exist_ok=True)
    with open(os.path.join(BOX, path), "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def guarded(text: str, path: str, namespace: dict[str, Any], *, check: bool = False) -> int:
    """Runs a text as a program; its exit code, as the interpreter gives it. A check that exits has not come to its end:
    it fails whatever the code is."""
    linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    try:
        exec(compile(text, path, "exec", dont_inherit=True), namespace)
    except SystemExit as end:
        if check:
            print("SystemExit: the code exits within a check", file=sys.stderr)
            return 1
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 255
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        shown = error.__traceback__ and error.__traceback__.tb_next
        try:
            traceback.print_exception(type(error), error, shown)
        except BaseException:
            print(type(error).__name__, file=sys.stderr)
        return 1
    return 0


def checked(checks: dict[str, Any], namespace: dict[str, Any], code_file: str) -> int:
    secret = checks["secret"].encode()

    def report(**fields: Any) -> None:
        os.write(3, secret + json.dumps(fields).encode() + b"\n")

    worst = 0
    for number, text in enumerate(checks.get("asserts", ())):
        code = guarded(text, f"test {number + 1}", namespace, check=True)
        worst = worst or code
        report(check=number, passed=not code)
    if "call" in checks:
        function = namespace.get(checks["call"])
        if not callable(function):
            print(f"the code defines no function {checks['call']!r}", file=sys.stderr)
            return 1
        try:
            value = json.loads(json.dumps(function(*checks["arguments"])))
            if depth(value) > DEEPEST_VALUE:
                raise ValueError(f"the function's value is nested in more than {DEEPEST_VALUE} levels")
            report(value=value)
        except BaseException as error:
            traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
            return 1
    for number, passed in enumerate(suite(checks["files"], checks["scripts"], code_file) if "files" in checks else ()):
        worst = worst or (not passed)
        report(check=number, passed=passed)
    report(done=True)
    return int(worst)


class TestRun(unittest.TestResult):
    """The end of one test. A skip that comes out of the judged file is a failure."""

    def __init__(self, code_file: str) -> None:
        super().__init__()
        self.code_file = os.path.abspath(code_file)
        self.ended = False
        """It came to its end as it should."""

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.ended = True

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        self.ended = True

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        super().addSubTest(test, subtest, err)
        self.ended = self.ended or err is None

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        error = sys.exc_info()  # none where a decorator skips the test
        if error[0] is not None and any(
            os.path.abspath(frame.f_code.co_filename) == self.code_file for frame, _ in traceback.walk_tb(error[2])
        ):
            self.addFailure(test, error)

    @property
    def passed(self) -> bool | None:
        """None for a test that its file skips."""
        if self.errors or self.failures:
            return False
        return True if self.ended else None if self.skipped else False


def suite(files: Mapping[str, str], scripts: Sequence[str], code_file: str) -> Iterator[bool]:
    """Whether each test in these files passes: those of unittest, and functions without arguments named ``test…``. One
    of the ``scripts`` without either is one test."""
    for path, text in files.items():
        write_file(path, text)
    for path in files:
        name = os.path.basename(path)
        if not (name.startswith("test") and name.endswith(".py")):
            continue
        sys.path.insert(0, os.path.dirname(os.path.join(BOX, path)))
        module_name = path[: -len(".py")].replace("/", ".")
        module = sys.modules[module_name] = ModuleType(module_name)
        module.__file__ = os.path.join(BOX, path)
        try:
            exec(compile(files[path], module.__file__, "exec", dont_inherit=True), module.__dict__)
        except BaseException as error:
            traceback.print_exception(type(error), error, error.__traceback__)
            yield False
            continue
        tests = list(tests_of(module))
        if not tests and path in scripts:
            yield True
        for test in tests:
            if unawaited(test):
                print(f"{test.id()} is a coroutine or a generator, which does not run as a test", file=sys.stderr)
                yield False
                continue
            result = TestRun(code_file)
            test.run(result)
            for _, story in result.errors + result.failures:
                print(story, file=sys.stderr)
            if result.passed is not None:
                yield result.passed


def unawaited(test: unittest.TestCase) -> bool:
    """Whether a call of the test runs nothing of it."""
    function = getattr(test, "_testFunc", None) or getattr(test, test.id().rpartition(".")[2], None)
    if inspect.iscoroutinefunction(function):
        return not isinstance(test, unittest.IsolatedAsyncioTestCase)
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def tests_of(module: ModuleType) -> Iterator[unittest.TestCase]:
    found: list[Any] = [unittest.defaultTestLoader.loadTestsFromModule(module)]
    while found:
        test = found.pop(0)
        if isinstance(test, unittest.TestSuite):
            found = [*test, *found]
        else:
            yield test
    for name, value in list(vars(module).items()):
        if name.startswith("test") and inspect.isfunction(value) and value.__module__ == module.__name__:
            yield unittest.FunctionTestCase(value)


if __name__ == "__main__":
    main()
