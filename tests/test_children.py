"""Child processes: they import nothing from the working directory, and process 1 is an init."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import until

from rookery.children import child_variables, interpreter, set_session_priority
from rookery.environments.checks import EnvironmentChecks
from rookery.environments.sandbox.sandbox import Program, Sandbox
from rookery.environments.verifiers.pool import ANSWER, LOW_PRIORITY, VerifierPool

SOURCE = Path(__file__).parents[1] / "src" / "rookery"

MODULES = {
    "rookery.worker.process": ["--help"],
    "rookery.start": ["rookery.worker.process", "--help"],
    "rookery.environments.host": ["--help"],
    "rookery.environments.verifiers.pool": ["1", "none"],
    "rookery.environments.check_process": ["1", "check", "{}"],
    "rookery.server.schema_process": ["1", "schema"],
    "rookery.worker.model.convert": ["--help"],
    "rookery.cluster.ray": ["--help"],
}
"""Every module that the service starts as a process, with arguments that end it at once."""


@pytest.mark.parametrize("module", MODULES)
def test_children_import_nothing_from_the_working_directory(tmp_path: Path, module: str) -> None:
    """Files of a research folder may have the names of the library's modules, and of packages. A shell may have an
    empty entry in PYTHONPATH, from ``export PYTHONPATH=$PYTHONPATH:/x``."""
    run = tmp_path / "imported"
    names = {*sys.stdlib_module_names, "torch", "numpy", "msgspec", "rookery", "websockets", "httpx", "regex", "ray"}
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"open({str(run)!r}, 'a').write({name!r})\n")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path), ""])}
    done = subprocess.run(
        interpreter(module, *MODULES[module]), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env=child_variables(variables),
    )  # fmt: skip
    assert not run.exists(), run.read_text()
    assert "Error" not in done.stderr.replace("UserError", "") or module.endswith("pool"), done.stderr


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("", None), (":", None), (":/x", "/x"), ("lib:", "lib"), ("/a::/b", "/a:/b"), ("/a:/b", "/a:/b"),
        (".:/a", ".:/a"),
    ],
)  # fmt: skip
def test_a_child_has_no_empty_entry_in_its_search_path(given: str, left: str | None) -> None:
    """A ``.`` is somebody's wish."""
    variables = child_variables({"PYTHONPATH": given, "PATH": "/bin"})
    assert variables == {"PATH": "/bin"} | ({} if left is None else {"PYTHONPATH": left})


@pytest.mark.parametrize("name", ["PYTHONOPTIMIZE", "PYTHONINSPECT"])
def test_children_keep_docstrings_and_end(name: str) -> None:
    """A shell or an image may set them: transformers reads docstrings, and a child has an input that stays open."""
    variables = child_variables({**os.environ, name: "2"})
    assert name not in variables
    command, output = interpreter("this"), subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, env=variables) as child:
        assert child.wait(60) == 0


@pytest.mark.parametrize("inherited", ["--ignore-signal=CHLD", "--block-signal=TERM,INT,CHLD"])
def test_signals_that_a_parent_ignores_or_blocks_reach_a_program(tmp_path: Path, inherited: str) -> None:
    """Without SIGCHLD the exit codes of its children are lost, such as that of a worker that refuses to start."""
    (tmp_path / "parent.py").write_text(
        "import signal, subprocess, sys\n"
        "print(subprocess.run([sys.executable, '-c', 'raise SystemExit(2)']).returncode, flush=True)\n"
        "signal.pause()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = ["env", inherited, sys.executable, "-m", "rookery.start", "parent"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "2\n"
        child.terminate()
        assert child.wait(60) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_a_program_that_still_imports(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Also process 1 of a container, where a signal without a handler is lost."""
    (tmp_path / "slow.py").write_text("import signal\nprint('imports', flush=True)\nsignal.pause()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = ["env", "--default-signal=INT", sys.executable, "-m", "rookery.start", "slow"]  # tests may ignore it
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "imports\n"
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        assert (child.returncode, said) == (code, "")


CONTAINER = ["unshare", "--pid", "--fork", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
"""Runs a command as process 1 of new numbers of processes."""


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a program as process 1, by the entry of all programs."""
    if shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], check=False).returncode:
        pytest.skip("processes cannot have numbers of their own here")
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        (tmp_path / "contained.py").write_text(program)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        defaults = ["env", "--default-signal=INT,HUP"]  # tests may ignore them
        command = [*CONTAINER, "--kill-child", *defaults, sys.executable, "-m", "rookery.start", "contained"]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()


ORPHANS = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
for _ in range(30):
    if not (between := os.fork()):
        os.fork()
        os._exit(0)
    os.waitpid(between, 0)
print(os.getpid(), flush=True)
signal.pause()
"""
"""Starts processes whose parents end before them."""


def test_process_1_waits_for_orphans_passes_signals_on_and_ends_as_its_program(
    container: Callable[[str], subprocess.Popen[str]],
) -> None:
    child = container(ORPHANS)
    assert child.stdout is not None and int(child.stdout.readline()) > 1
    (first,) = psutil.Process(child.pid).children()
    until(lambda: len(first.children()) == 1, lambda: f"{first.children()}")
    first.send_signal(signal.SIGTERM)
    assert child.wait(60) == 7


@pytest.mark.parametrize(
    ("program", "number", "code"),
    [
        ("import sys; print(1, flush=True); sys.exit(5)", None, 5),
        ("import os; print(1, flush=True); os.kill(os.getpid(), 9)", None, 137),
        ("import signal; print(1, flush=True); signal.pause()", signal.SIGTERM, 143),
        ("import signal; print(1, flush=True); signal.pause()", signal.SIGINT, 130),
        ("import signal; print(1, flush=True); signal.pause()", signal.SIGHUP, 129),
    ],
)
def test_process_1_has_the_exit_code_of_its_program(
    container: Callable[[str], subprocess.Popen[str]], program: str, number: signal.Signals | None, code: int
) -> None:
    """Without a handler a signal is lost to process 1 itself."""
    child = container(program)
    assert child.stdout is not None and child.stdout.readline() == "1\n"
    if number is not None:
        psutil.Process(child.pid).children()[0].send_signal(number)
    assert child.wait(60) == code


def test_output_of_a_starting_interpreter_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the ``sitecustomize`` of an image, or somebody's ``usercustomize``."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.write(1, b'Welcome \\xff\\n{}\\n[] ')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with closing(VerifierPool("schema", module="rookery.server.schema_process", children=1)) as pool:
        for _ in range(2):
            assert pool.score({"offered": {}, "followed": {}}) == ["", ""]


def test_low_priority_counts_against_processes_of_other_sessions() -> None:
    """Linux may divide processor time by session first, and every child has a session of its own."""
    group, code = Path("/proc/self/autogroup"), "import os; print(os.nice(0))"
    shown = code + f"; print(open({str(group)!r}).read())" if group.exists() else code
    done = subprocess.run(
        [sys.executable, "-c", f"from rookery.children import lower_priority; lower_priority(10); {shown}"],
        start_new_session=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    own, *session = done.stdout.split("\n", 1)
    assert int(own) == min(19, os.nice(0) + 10) and (not group.exists() or session[0].split()[-1] == "10"), done.stdout


@contextmanager
def closing_process(process: subprocess.Popen[str]) -> Iterator[None]:
    """It is killed with its group at the end."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def checks_a_schema() -> Callable[[], None]:
    checks = VerifierPool("schema", module="rookery.server.schema_process", children=1)
    checks.score({"offered": {}, "followed": {}})
    return checks.close


def checks_options() -> Callable[[], None]:
    checks = EnvironmentChecks()
    checks.validate("jsonl", {"rows": [{"prompt": "?", "answer": "1"}], "verifier": "exact"})
    return checks.close


def runs_a_program() -> Callable[[], None]:
    sandbox = Sandbox()
    sandbox.run(Program("pass"))
    return sandbox.close


@pytest.mark.parametrize("begin", [checks_a_schema, checks_options, runs_a_program])
def test_confined_children_have_a_low_priority(begin: Callable[[], Callable[[], None]]) -> None:
    """The bytes of strangers, whose computing must not slow the service and its workers."""
    if begin is runs_a_program and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap: apt-get install bubblewrap")
    before, own = set(psutil.Process().children(recursive=True)), os.nice(0)
    close = begin()
    try:
        found = [one for one in psutil.Process().children(recursive=True) if one not in before]
        python = [one for one in found if "python" in one.name()]
        assert python and all(one.nice() >= min(19, own + 5) for one in python), found
        sessions = [Path(f"/proc/{one.pid}/autogroup") for one in python]
        assert all(int(session.read_text().split()[-1]) >= 5 for session in sessions if session.exists())
    finally:
        close()


def test_service_answers_while_a_thread_computes() -> None:
    """The garbage collector leaves out what a started service consists of, and threads give way in a millisecond."""
    code = "import rookery.server.launcher, gc, sys; from rookery.aio import prefer_event_loop; prefer_event_loop();"
    code += "print(gc.get_freeze_count(), sys.getswitchinterval(), sum(map(len, map(gc.get_objects, range(3)))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    frozen, interval, left = map(float, done.stdout.split())
    assert frozen > 100_000 and interval <= 0.001 and left < 1000


def test_every_child_is_started_by_the_same_command() -> None:
    """``sys.executable`` stands in texts for people, and in the one function that makes a child's command."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.List | ast.Tuple):
                continue
            if any(ast.unparse(element) == "sys.executable" for element in function.elts):
                found.add(str(path.relative_to(SOURCE)))
    assert found == {"children.py"}


STARTS = {
    "subprocess.Popen": "env", "subprocess.run": "env", "asyncio.create_subprocess_exec": "env", "os.execve": 2,
}  # fmt: skip
"""The functions that start a process, and where each takes its environment: by name or by place."""


def test_every_child_gets_its_variables_from_one_function() -> None:
    started = set()
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {name.name for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) for name in one.names}
        if "interpreter" not in imported:
            continue
        for call in ast.walk(tree):
            where = STARTS.get(ast.unparse(call.func)) if isinstance(call, ast.Call) else None
            if where is None:
                continue
            assert isinstance(call, ast.Call)
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            variables = given.get(where) if isinstance(where, str) else call.args[where]
            assert variables is not None and ast.unparse(variables).startswith("child_variables("), ast.unparse(call)
            started.add(path.name)
    assert started == {
        "adapters.py", "base_models.py", "models.py", "plan.py", "pool.py", "ray.py", "serve.py", "supervisor.py",
    }  # fmt: skip


def test_priority_of_a_session_is_tried_again_where_linux_has_no_time_for_it() -> None:
    """It changes ten in a second for processes without privileges: the file refuses, as a full pipe does."""
    read, write = os.pipe()
    try:
        os.set_blocking(write, False)
        full = os.write(write, bytes(1 << 20))
        assert not set_session_priority(write, 19, tries=1)
        assert len(os.read(read, full)) == full
        assert set_session_priority(write, 19, tries=1) and os.read(read, 100) == b"19"
    finally:
        os.close(read)
        os.close(write)
    assert set_session_priority(read, 19), "it is not permitted: no other try helps"


LONG_SCORE = """
import os
from pathlib import Path
from rookery.environments.verifiers.pool import serve

def priorities():
    return os.getpriority(os.PRIO_PROCESS, 0), Path("/proc/self/autogroup").read_text().split()[-1]

def score(until):
    while until and priorities() != (19, "19"):
        pass
    return priorities()

serve(lambda: score)
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="Linux without groups of sessions")
def test_a_long_score_yields_to_all_sessions_and_the_next_one_has_its_priority_again() -> None:
    command = [sys.executable, "-c", LONG_SCORE, "600", "long"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip
    with process, closing_process(process):
        assert process.stdin is not None and process.stdout is not None
        found = []
        for until_yielded in (False, True, False):
            question = {"question": {"until": until_yielded}, "limit": None, "memory": None}
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            found.append(json.loads(process.stdout.readline().rpartition(ANSWER)[2])["score"])
    low = min(19, os.nice(0) + LOW_PRIORITY)
    assert found == [[low, str(LOW_PRIORITY)], [19, "19"], [low, str(LOW_PRIORITY)]]
