"""Child processes: they import nothing from the working directory."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rookery.children import interpreter

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
    """Files of a research folder may have the names of the library's modules, and of packages."""
    run = tmp_path / "imported"
    names = {*sys.stdlib_module_names, "torch", "numpy", "msgspec", "rookery", "websockets", "httpx", "regex", "ray"}
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"open({str(run)!r}, 'a').write({name!r})\n")
    done = subprocess.run(
        interpreter(module, *MODULES[module]), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert not run.exists(), run.read_text()
    assert "Error" not in done.stderr.replace("UserError", "") or module.endswith("pool"), done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_a_program_that_still_imports(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Also process 1 of a container, where a signal without a handler is lost."""
    (tmp_path / "slow.py").write_text("import time\nprint('imports', flush=True)\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = ["env", "--default-signal=INT", sys.executable, "-m", "rookery.start", "slow"]  # tests may ignore it
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "imports\n"
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
        assert (child.returncode, said) == (code, "")


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


def test_service_answers_while_a_thread_computes() -> None:
    """The garbage collector leaves out what a started service consists of, and threads give way in a millisecond."""
    code = "from rookery.server import launcher; launcher.prefer_event_loop(); import gc, sys;"
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
