"""Programs that try to leave the sandbox, to take more than their limits, or to outlive themselves.

Each program prints ``ESCAPED`` where it succeeds. A control runs those that are harmless outside without a sandbox,
where they do succeed: a program that can print nothing tests nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.waiting import until

from rookery.environments.sandbox.sandbox import Program, ProgramLimits, Sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")

LIMITS = ProgramLimits(seconds=0.2)

OUTSIDE = {
    "fork": "import os\nif os.fork() == 0: os._exit(0)\nprint('ESCAPED')",
    "start of a program": "import subprocess\nsubprocess.run(['/bin/true'])\nprint('ESCAPED')",
    "replacement by a program": "import os\nos.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "process of multiprocessing": (
        "import multiprocessing\np = multiprocessing.get_context('fork').Process(target=int)\np.start()\np.join()\n"
        "print('ESCAPED')"
    ),
    "files of the machine": "import os\nfor path in ('/etc/passwd', '/root', '/home'): os.stat(path)\nprint('ESCAPED')",
    "the checkout": "open(FILE).read()\nprint('ESCAPED')",
    "/proc": "import os\nprint('ESCAPED', os.listdir('/proc/1'))",
    "memory of the parent through /proc": "import os\nopen(f'/proc/{os.getppid()}/maps').read(1)\nprint('ESCAPED')",
    "/sys": "import os\nprint('ESCAPED', os.listdir('/sys/kernel'))",
    "connection to the machine": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint('ESCAPED')",
    "socket to the internet": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nprint('ESCAPED')",
    "socket by name": "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0rookery-test')\nprint('ESCAPED')",
    "symbolic link to the machine": (
        "import os, tempfile\nlink = os.path.join(tempfile.mkdtemp(), 'link')\nos.symlink('/etc', link)\n"
        "print('ESCAPED', os.listdir(link))"
    ),
    "signal to the parent": "import os\nos.kill(os.getppid(), 0)\nprint('ESCAPED')",
    "signal to itself by another call": "import os, signal\nos.pidfd_open(os.getppid())\nprint('ESCAPED')",
    "environment variables": "import os\nif os.environ.get('ROOKERY_SECRET'): print('ESCAPED')",
    "wide file descriptor limit": (
        "import resource\nfiles = [open('/dev/null') for _ in range(100)]\nprint('ESCAPED')"
    ),
    "owner of signals": (
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())\nprint('ESCAPED')"
    ),
    "memory shared by name": "import os\nos.memfd_create('x')\nprint('ESCAPED')",
    "much memory": "x = bytearray(400 << 20)\nprint('ESCAPED')",
}  # fmt: skip
"""Attempts that succeed outside, and do no harm there."""

_SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"

INSIDE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork(); print('ESCAPED')\n    except OSError: pass",
    "bomb of threads": (
        "import threading, time\nthreading.stack_size(65536)\ncount = 0\ntry:\n    while count < 5000:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n        count += 1\n"
        "    print('ESCAPED')\nexcept RuntimeError: pass"
    ),
    "kill of the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint('ESCAPED')",
    "kill of everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\nprint('ESCAPED')",
    "trace of the parent": _SYSCALL + "import os\nif libc.ptrace(16, os.getppid(), 0, 0) == 0: print('ESCAPED')",
    "trace by the parent": _SYSCALL + "if libc.ptrace(0, 0, 0, 0) == 0: print('ESCAPED')",
    "memory of the parent": (
        _SYSCALL + "import os\nbuffer = ctypes.create_string_buffer(8)\n"
        "class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
        "v = V(ctypes.addressof(buffer), 8)\n"
        "if libc.process_vm_readv(os.getppid(), ctypes.byref(v), 1, ctypes.byref(v), 1, 0) != -1: print('ESCAPED')"
    ),
    "name space": _SYSCALL + "if libc.unshare(0x10000000) == 0: print('ESCAPED')",
    "mount": _SYSCALL + "if libc.mount(b'none', b'/box', b'tmpfs', 0, None) == 0: print('ESCAPED')",
    "another root": _SYSCALL + "if libc.chroot(b'/box') == 0: print('ESCAPED')",
    "call of the other interface": (
        _SYSCALL + "r = libc.syscall(0x40000000 + 41, 1, 1, 0)\nif r >= 0: print('ESCAPED')"
    ),
    "replacement by the interpreter": (
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'print(\"ESCAPED\")'])"
    ),
    "user root": "import os\nos.setuid(0)\nprint('ESCAPED')",
    "higher limit": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\nprint('ESCAPED')"
    ),
    "limit of the parent": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))\nprint('ESCAPED')"
    ),
    "file of the interpreter": "open(__import__('os').__file__, 'a')\nprint('ESCAPED')",
    "file outside the folder": "open('/left', 'w')\nprint('ESCAPED')",
    "device": "import os\nos.mknod('/box/disk', 0o600 | 0x6000, os.makedev(8, 0))\nprint('ESCAPED')",
    "program with the rights of root": "import os\nprint('ESCAPED', os.listdir('/usr/bin'), os.stat('/usr/bin/su'))",
    "full disk": "with open('full', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))\nprint('ESCAPED')",
    "ignored signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass"
    ),
    "caught exit": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleep without end": "import time\ntime.sleep(1000)\nprint('ESCAPED')",
    "computation in one call": "9 ** 9 ** 9\nprint('ESCAPED')",
    "huge output": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "huge error output": "import sys\nwhile True: sys.stderr.write('x' * 65536)",
    "exit before the end": "import os\nos._exit(0)",
    "closed descriptors": "import os\nos.closerange(0, 64)\nwhile True: pass",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()\nprint('ESCAPED')",
    "native crash": "import ctypes\nctypes.string_at(0)\nprint('ESCAPED')",
    "thread that outlives its program": (
        "import threading\ndef spin():\n    while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
    ),
}  # fmt: skip
"""Attempts that are made in the sandbox alone."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    os.environ["ROOKERY_SECRET"] = "secret"
    running = Sandbox()
    yield running
    running.close()
    del os.environ["ROOKERY_SECRET"]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def _code(text: str, port: int) -> str:
    return textwrap.dedent(text).replace("PORT", str(port)).replace("FILE", repr(__file__))


@pytest.mark.parametrize("name", [*OUTSIDE, *INSIDE])
def test_a_program_does_not_escape(name: str, sandbox: Sandbox, port: int) -> None:
    began = time.monotonic()
    result = sandbox.run(Program(_code((OUTSIDE | INSIDE)[name], port)), LIMITS)
    assert "ESCAPED" not in result.stdout
    assert len(result.stdout) <= LIMITS.output and len(result.stderr) <= LIMITS.output
    assert result.seconds < 2.0  # its limit, and what its end costs
    assert time.monotonic() - began < 30
    after = sandbox.run(Program("import os\nprint(os.listdir('.'), 6 * 7)"))
    assert (after.status, after.stdout) == ("ok", "[] 42\n")


@pytest.mark.parametrize("name", OUTSIDE)
def test_the_same_program_succeeds_outside(name: str, port: int) -> None:
    command = [sys.executable, "-c", _code(OUTSIDE[name], port)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"ROOKERY_SECRET": "1"}, check=False)
    assert "ESCAPED" in ran.stdout, ran.stderr


def test_nothing_of_a_sandbox_is_left_when_it_is_closed(sandbox: Sandbox) -> None:
    before = _confinements()
    other = Sandbox()
    other.run(Program("pass"))
    assert _confinements() > before
    other.close()
    assert _confinements() == before


def test_a_sandbox_ends_with_its_process() -> None:
    code = (
        "from rookery.environments.sandbox.sandbox import Program, Sandbox\n"
        "sandbox = Sandbox()\nsandbox.run(Program('pass'))\n"
        "print('ready', flush=True)\nsandbox.run(Program('import time\\ntime.sleep(60)'))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    listed = ["ps", "-o", "pid=", "--ppid", str(process.pid)]
    children = [int(pid) for pid in subprocess.run(listed, capture_output=True, check=True).stdout.split()]
    assert children
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def _confinements() -> int:
    """Children of this process that are bubblewrap."""
    listed = subprocess.run(
        ["ps", "-o", "comm=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    return listed.stdout.split().count("bwrap")
