"""The shared part of every measure: the machine's name, medians, the model as peers want it, and where results go.

A result is one JSON file in ``results/``: what was measured, on what, with which command, all repeats and the verdicts.
``report.py`` makes the tables and plots from these files alone, so that no figure is ever typed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rookery.cluster.base import preloaded
from rookery.settings import Settings

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parent
RESULTS = HERE / "results"
WORK = Path(os.environ.get("ROOKERY_BENCH", ROOT / ".bench"))
"""Peers' environments and the model in their format: all that can be made again."""
LOCAL = WORK / "results"
"""Results of a machine that is not the one of ``RESULTS``."""
PUBLISH = "ROOKERY_BENCH_PUBLISH"
"""Variable that, if not empty, lets another machine's results replace those in ``RESULTS``."""
MODEL = "smollm2-135m-instruct"


@dataclass
class Row:
    """One line of a table. ``values`` are all repeats, in ``unit``; the table shows their median and range."""

    what: str
    values: list[float]
    unit: str
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.what}: {self.median:.4g} {self.unit}  {self.note}".rstrip()


MET = {True: "met", False: "not met", None: "not measured"}
"""In words."""


@dataclass
class Verdict:
    """A target and what was measured. ``met`` is None where it could not be measured; ``why`` says more."""

    target: str
    measured: str
    met: bool | None
    why: str = ""

    def __str__(self) -> str:
        return f"{self.target}: {self.measured} ({MET[self.met]}) {self.why}".rstrip()


@dataclass
class Result:
    name: str
    title: str
    command: str
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    date: str = ""
    """The day of the measurement, as ISO writes it."""
    commit: str = ""
    """The commit that was measured; ``+`` follows it where files differed from that commit."""
    simulated: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    """The input of plots."""

    def add(self, what: str, values: Sequence[float], unit: str, note: str = "") -> Row:
        row = Row(what, [float(value) for value in values], unit, note)
        self.rows.append(row)
        print(f"  {row}", flush=True)
        return row

    def judge(self, target: str, measured: str, met: bool | None, why: str = "") -> None:
        verdict = Verdict(target, measured, met, why)
        self.verdicts.append(verdict)
        print(f"  {verdict}", flush=True)

    def judge_rows(self, judged: Callable[[Mapping[str, Row]], list[Verdict]]) -> None:
        """Add the verdicts of the rows, by a function that ``report.py`` has too: a bar that changes later needs no
        new run."""
        for verdict in judged({row.what: row for row in self.rows}):
            self.verdicts.append(verdict)
            print(f"  {verdict}", flush=True)

    def save(self, folders: ResultFolders | None = None) -> None:
        """Write it whole, with the machine, the versions and, unless it has them, the day and the commit, to
        ``folders`` or the repository's. Where nothing was measured, as a machine cannot do it, the earlier result
        stays."""
        if not (self.rows or self.verdicts or self.data):
            print("nothing was measured:", "; ".join(self.notes) or "no contender ran", flush=True)
            return
        folders = folders or ResultFolders()
        self.machine = folders.machine
        self.date, self.commit = self.date or time.strftime("%Y-%m-%d"), self.commit or commit()
        self.versions = {**versions("torch", "rookery"), **self.versions}
        path = folders.path(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_whole(path, self.command)
        write_result(path, asdict(self))
        print(f"wrote {path}")


def keep_whole(path: Path, command: str) -> None:
    """Before a ``--quick`` run's result replaces a whole one's, copy that one to the folder ``other``, from which the
    page takes the figures that the quick run lacks."""
    if path.exists() and "--quick" in command and "--quick" not in json.loads(path.read_text())["command"]:
        other = path.parent / "other" / path.name
        other.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, other)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """A process that ends meanwhile leaves the file as it was."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``folder`` once that is done: a process that ends meanwhile leaves none."""
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    yield new
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def machine() -> str:
    """Cores, processor, memory, Python, and the allocator of compute processes if it is not the C library's. A virtual
    machine's processor may hide its name: family and model tell those apart of which one is twice as quick."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        about = dict(re.findall(r"^(.+?)\s*: (.+)$", info.read_text(), re.MULTILINE))
        name = about.get("model name", name)
        if "cpu family" in about:
            name += f" (family {about['cpu family']}, model {about['model']})"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    allocator = Settings.load().worker.allocator
    given = f", {allocator}" if preloaded({}, allocator) else ""
    return f"{cores} cores of {name}, {memory:.0f} GiB, Python {platform.python_version()}{given}"


def publishes() -> bool:
    """Whether this machine's results replace those of another one in ``RESULTS``."""
    return bool(os.environ.get(PUBLISH))


@dataclass(frozen=True)
class ResultFolders:
    """Where the results of a machine are written."""

    published: Path = RESULTS
    local: Path = LOCAL
    """Its results that are another machine's in ``published``."""
    machine: str = field(default_factory=machine)
    publishes: bool = field(default_factory=publishes)
    """Whether its results replace another machine's."""

    def path(self, name: str) -> Path:
        """The file of a result."""
        path = self.published / f"{name}.json"
        foreign = path.exists() and json.loads(path.read_text())["machine"] != self.machine
        return self.local / path.name if foreign and not self.publishes else path


def commit() -> str:
    """The short hash of what is checked out, with ``+`` where tracked files other than results differ from it; empty
    without git."""
    try:
        run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
        elsewhere = [f":!benchmarks/{name}" for name in ("results", "plots", "RESULTS.md")]  # a measure writes there
        changed = run(["git", "status", "--porcelain", "--untracked-files=no", "--", ".", *elsewhere]).stdout
        return str(run(["git", "rev-parse", "--short", "HEAD"]).stdout).strip() + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command() -> str:
    """How this script was called."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    return " ".join(["python -m", ".".join(script.parts), *sys.argv[1:]])


def options(description: str | None, quick: str = "", *, repeats: int = 3) -> argparse.ArgumentParser:
    """The options of a script: ``--repeats``, and ``--quick`` where ``quick`` says what that leaves."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="runs of each contender (default: %(default)s)")
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def repeats(description: str | None) -> int:
    """The ``--repeats`` of a script that has no other option."""
    return int(options(description).parse_args().repeats)


def peer_python(name: str) -> Path | None:
    """The interpreter of a peer's environment, which ``make bench-peers`` makes; None where it is missing."""
    path = WORK / name / "bin" / "python"
    return path if path.exists() else None


def ratio(ours: Row, theirs: Row) -> float:
    """Median over median."""
    return ours.median / theirs.median
