"""Runs programs of strangers, one process each, in confinements that stay warm between programs.

A :class:`Sandbox` keeps up to :data:`CONFINEMENTS` of them: bubblewrap (or gVisor) with no network, no environment
variables, no processes of the machine, no files but the interpreter's, and one folder in memory. Inside,
:mod:`rookery.environments.sandbox.confined` forks a process per program, with limits and a seccomp filter
(:mod:`rookery.environments.sandbox.seccomp`) that leaves it neither processes nor sockets.

Started by root, the confinement runs as a user that exists nowhere else; started by another user, in a user namespace.
Programs have the standard library of the service's Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from rookery.children import add_child_seconds, lower_session_priority
from rookery.environments.sandbox import seccomp
from rookery.environments.sandbox.confined import WALL
from rookery.environments.warm_processes import WarmProcesses
from rookery.errors import UserError, short
from rookery.folders import temporary_file, temporary_folder

Isolation = Literal["bubblewrap", "gvisor"]

PROGRAMS = {"bubblewrap": "bwrap", "gvisor": "runsc"}
"""The program of each isolation."""

CONFINEMENTS = 2
"""Most confinements of one sandbox. Each is one warm Python of 15 MB; more of them do not finish sooner on few cores,
and each job has its own sandbox."""

LOW_PRIORITY = 10
"""Niceness of programs: somebody waits for them, but not before the work of the service and its workers."""

START_SECONDS = 60.0
"""Longest start of a confinement: 0.1 s with bubblewrap on a quiet machine, seconds with gVisor."""

BOX_BYTES = 16 << 20
"""Size of the writable folder, and of one file in it."""

LONGEST_ANSWER = 64 << 20
"""Bytes of one answer of a confinement: both outputs of 4 MB as JSON, where an escape makes six characters of one."""

FIRST_USER = 0x60000000
"""Users of confinements that root starts: numbers that no system gives to anybody."""


class SandboxError(RuntimeError):
    """A confinement ended or could not start; the program has no result. One line."""


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of one program. A program that exceeds one is ended."""

    seconds: float = 2.0
    """Processor time. By the clock it has five times as long, and a second."""
    memory: int = 256 << 20
    """Bytes of address space in addition to those of an idle interpreter."""
    output: int = 64 << 10
    """Bytes of standard output, and of standard error."""


DEFAULT_LIMITS = ProgramLimits()


@dataclass(frozen=True)
class Program:
    """One program and its checks. The checks come into the process of the code when the code has run, or when it asks
    for them as its starter does: code written for that reads them and reports what it likes. So does code that changes
    what a check uses, such as an object that equals everything. Only what is compared outside, the output of a program
    without checks, cannot be forged."""

    code: str | None
    """Python that runs first; None runs the checks alone."""
    stdin: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their path in the working directory, written before the code runs."""
    path: str = "reply.py"
    """The name of the code in tracebacks."""
    asserts: Sequence[str] = ()
    """Checks: each is Python that runs in the code's module, and passes unless it raises or exits."""
    call: str = ""
    """A check: the function of the code that is called, with ``arguments``; its result, as JSON, is the value."""
    arguments: Sequence[Any] = ()
    tests: Mapping[str, str] = field(default_factory=dict)
    """Checks: files of tests by their path, of which ``test*.py`` run: classes of unittest, and functions ``test*``
    without arguments. A skip that comes out of the file ``path`` is a failure."""
    scripts: Sequence[str] = ()
    """Paths of tests that check while they are loaded: each is one check where it has no other test."""

    def checks(self) -> dict[str, Any]:
        """The checks as the confinement gets them; empty without any."""
        found: dict[str, Any] = {}
        if self.asserts:
            found["asserts"] = list(self.asserts)
        if self.call:
            found |= {"call": self.call, "arguments": list(self.arguments)}
        if self.tests:
            found |= {"files": dict(self.tests), "scripts": list(self.scripts)}
        return found


@dataclass(frozen=True)
class ProgramResult:
    """How one program ended."""

    status: Literal["ok", "error", "time", "output", "signal"]
    """``ok``: exit code 0 and every check passed. ``error``: another code, an exception or a failed check. ``time`` and
    ``output``: a limit ended it. ``signal``: a signal did."""
    code: int
    """The exit code, or a signal's number with a minus."""
    stdout: str
    stderr: str
    passed: list[bool]
    """Of each check that came to its end, in order."""
    done: bool
    """All checks came to their end."""
    value: Any
    """The result of the called function; None without one."""
    seconds: float
    """Processor time."""
    elapsed: float
    """Time by the clock."""

    @property
    def last_line(self) -> str:
        """The last line of standard error, which names an exception; else what ended the program."""
        lines = self.stderr.strip().splitlines()
        if self.status == "time":
            return "the time limit ended it"
        if self.status == "output":
            return "it wrote more than the limit"
        return short(lines[-1]) if lines else f"it ended with {self.code}"


_isolation_of_process: Isolation = "bubblewrap"


def set_isolation(isolation: Isolation) -> None:
    """The isolation of sandboxes that this process makes from now on. Called once when a process starts."""
    global _isolation_of_process
    _isolation_of_process = isolation


def isolation() -> Isolation:
    """The isolation of sandboxes that this process makes where none is given."""
    return _isolation_of_process


def find(isolation: Isolation) -> str:
    """The program of an isolation. Raises :class:`UserError` where this machine cannot have it."""
    found = shutil.which(PROGRAMS[isolation])
    if not sys.platform.startswith("linux") or not seccomp.supported():
        raise UserError("sandbox: needs Linux on x86-64 or 64-bit ARM; run code in an environment of your own")
    if found is None:
        package = {"bubblewrap": "bubblewrap", "gvisor": "runsc"}[isolation]
        raise UserError(
            f"sandbox: {PROGRAMS[isolation]} is not installed on the service's machine, so no reply can be run as code"
            f" there; the administrator installs it with: apt-get install {package}"
        )
    return found


def check_path(path: str) -> None:
    """Raises ValueError unless ``path`` is relative and stays in its folder."""
    parts = PurePosixPath(path)
    if not path or parts.is_absolute() or ".." in parts.parts or "\0" in path or not parts.name or len(path) > 200:
        raise ValueError(
            f"{short(repr(path))} is no path inside the working directory; give one such as package/file.py"
        )


class Sandbox:
    """Thread-safe; every method blocks."""

    def __init__(
        self,
        isolation: Isolation | None = None,
        *,
        prelude: str = "",
        paths: Sequence[str] = (),
        confinements: int = CONFINEMENTS,
    ) -> None:
        """``isolation`` is that of this process (:func:`set_isolation`) where none is given. ``prelude`` is Python that
        runs once per confinement; its names are those of every program's module. ``paths`` are folders of further
        modules. Nothing starts before the first program."""
        self._isolation: Isolation = isolation or _isolation_of_process
        start = partial(_Confinement, self._isolation, prelude, tuple(paths))
        self._confinements = WarmProcesses(start, confinements)

    def require(self) -> None:
        """Raises :class:`UserError` where this machine has no sandbox."""
        find(self._isolation)

    def run(self, program: Program, limits: ProgramLimits = DEFAULT_LIMITS) -> ProgramResult:
        """Raises :class:`SandboxError` where the confinement ended, ValueError for a path outside, and
        :class:`UserError` where this machine has no sandbox."""
        for path in [*program.files, *program.tests, program.path]:
            check_path(path)
        checks = program.checks()
        asked = {
            "code": program.code,
            "stdin": program.stdin,
            "files": dict(program.files),
            "path": program.path,
            "module": "__main__" if not checks else "reply",
            "checked": bool(checks),
            "files_bytes": BOX_BYTES,
            **asdict(limits),
        }
        with self._confinements.borrow() as confinement:
            began = time.monotonic()
            try:
                result = ProgramResult(**confinement.ask(asked, checks))
            except SandboxError:  # how much it took is not known
                add_child_seconds(min(time.monotonic() - began, limits.seconds))
                raise
        add_child_seconds(result.seconds)
        if checks and result.status == "ok" and not result.done:  # it ended itself before its checks
            result = replace(result, status="error")
        return result

    def close(self) -> None:
        """Ends all confinements; programs that run have no result."""
        self._confinements.close()


class _Confinement:
    """One confinement: it ends when this process closes its standard input, or ends."""

    def __init__(self, isolation: Isolation, prelude: str, paths: tuple[str, ...]) -> None:
        program = find(isolation)
        root = os.geteuid() == 0
        source = Path(__file__).with_name("confined.py").read_text(encoding="utf-8")
        name = uuid.uuid4().hex
        configuration = {
            "uid": FIRST_USER + int(name[:6], 16) if root and isolation == "bubblewrap" else 0,
            "filter": seccomp.program().hex(),
            "paths": list(paths),
            "prelude": prelude,
            "niceness": LOW_PRIORITY,
        }
        inside = [_interpreter(), "-I", "-S", "-B", "-c", source, json.dumps(configuration)]
        self._errors = temporary_file()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if isolation == "bubblewrap":
            command = [program, *_bubblewrap(paths, root), "--", *inside]
        else:
            self._folder = temporary_folder("rookery-sandbox-")
            command = [program, *_gvisor(Path(self._folder.name), inside, paths, name)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
        )
        lower_session_priority(self._process.pid, LOW_PRIORITY)
        self._end = weakref.finalize(self, _end, self._process, self._folder)
        self.used = time.monotonic()
        self._clean = True
        """Nothing is left of the last program."""
        self._read(time.monotonic() + START_SECONDS)

    def alive(self) -> bool:
        return self._clean and self._process.poll() is None

    def ask(self, program: Mapping[str, Any], checks: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        frames = b"".join(_frame(message) for message in (program, checks))
        sender = threading.Thread(target=self._send, args=(frames,), daemon=True)
        sender.start()  # the confinement reads the checks late: they may not fit into the pipe before
        answer = self._read(time.monotonic() + WALL * program["seconds"] + START_SECONDS)
        sender.join()
        self.used, self._clean = time.monotonic(), answer["clean"]
        found: dict[str, Any] = answer["result"]
        return found

    def end(self) -> None:
        self._end()

    kill = end

    def _send(self, frames: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(frames)
        with contextlib.suppress(OSError, ValueError):  # it ended: reading reports it
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def _read(self, until: float) -> dict[str, Any]:
        length = int.from_bytes(self._read_exactly(4, until), "big")
        if length > LONGEST_ANSWER:
            raise SandboxError(f"the sandbox gave an answer of {length} bytes")
        answer: dict[str, Any] = json.loads(self._read_exactly(length, until))
        return answer

    def _read_exactly(self, count: int, until: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()
        found = bytearray()
        try:
            poll.register(self._process.stdout, select.POLLIN)
            while len(found) < count:
                if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                    raise SandboxError("the sandbox does not answer")
                part = self._process.stdout.read(count - len(found))
                if not part:
                    raise SandboxError(self._story())
                found += part
        except ValueError:  # closed by another thread
            raise SandboxError("the sandbox was closed") from None
        return bytes(found)

    def _story(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
        return f"the sandbox ended with {self._process.poll()}: {short(lines[-1]) if lines else 'no message'}"


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str] | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()  # bubblewrap is the parent of the first process inside, which ends at the end of its input
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()
    process.wait()
    if folder is not None:
        folder.cleanup()


def _frame(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode("utf-8", "replace")
    return len(body).to_bytes(4, "big") + body


def _interpreter() -> str:
    """The interpreter without the virtual environment."""
    return os.path.realpath(sys.executable)


def _visible(paths: Sequence[str]) -> Iterator[Path]:
    """Folders that are readable inside: the libraries of the system and of the interpreter, time zones, ``paths``."""
    prefix = Path(sys.base_prefix)
    found = ["/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    links = [path for path in ("/lib", "/lib64") if not Path(path).is_symlink()]
    for path in dict.fromkeys([*found, *links, str(prefix / "lib"), _interpreter(), *paths]):
        if Path(path).exists():
            yield Path(path)


def _links() -> Iterator[tuple[str, str]]:
    for path in ("/lib", "/lib64"):
        if Path(path).is_symlink():
            yield os.readlink(path), path


def _bubblewrap(paths: Sequence[str], root: bool) -> list[str]:
    arguments = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if root:  # the first process inside becomes another user, and has no capability after that
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        arguments += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    arguments += ["--clearenv", "--hostname", "sandbox"]  # its session is new, and has no terminal
    made: set[Path] = set()
    for path in _visible(paths):
        for parent in reversed(path.parents):  # else they are readable by their owner alone
            if parent not in made and parent != Path("/"):
                arguments += ["--perms", "0755", "--dir", str(parent)]
                made.add(parent)
        arguments += ["--ro-bind", str(path), str(path)]
    for target, path_ in _links():
        arguments += ["--symlink", target, path_]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        if Path("/dev") not in made:
            arguments += ["--perms", "0755", "--dir", "/dev"]
            made.add(Path("/dev"))
        arguments += ["--dev-bind", device, device]
    arguments += ["--perms", "0777" if root else "0700", "--size", str(BOX_BYTES), "--tmpfs", "/box"]
    return [*arguments, "--remount-ro", "/", "--chdir", "/box"]


def _gvisor(folder: Path, inside: Sequence[str], paths: Sequence[str], name: str) -> list[str]:
    """Writes a bundle of the Open Container Initiative and returns the arguments that run it."""
    root = folder / "root"
    mounts: list[dict[str, Any]] = [
        {"destination": "/dev", "type": "dev", "source": "dev"},
        {"destination": "/box", "type": "tmpfs", "source": "tmpfs", "options": ["mode=0777", f"size={BOX_BYTES}"]},
    ]
    for path in _visible(paths):
        mounts.append({"destination": str(path), "type": "bind", "source": str(path), "options": ["ro"]})
        target = root / str(path).lstrip("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
    for path_ in ("dev", "box", "proc"):
        (root / path_).mkdir(exist_ok=True)
    for target_, link in _links():
        (root / link.lstrip("/")).symlink_to(target_)
    for made in [folder, *root.rglob("*")]:
        if made.is_dir() and not made.is_symlink():
            made.chmod(0o755)
    process = {
        "terminal": False, "user": {"uid": 65534, "gid": 65534}, "args": list(inside), "cwd": "/box", "env": [],
        "capabilities": {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")},
        "noNewPrivileges": True,
    }  # fmt: skip
    kinds = ("pid", "network", "ipc", "uts", "mount")
    bundle = {
        "ociVersion": "1.0.0", "process": process, "root": {"path": str(root), "readonly": True},
        "hostname": "sandbox", "mounts": mounts, "linux": {"namespaces": [{"type": kind} for kind in kinds]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(bundle), encoding="utf-8")
    rootless = [] if os.geteuid() == 0 else ["--rootless"]
    state = ["--root", str(folder / "state")]
    return [*rootless, *state, "--network=none", "--ignore-cgroups", "run", "--bundle", str(folder), name]
