"""``rookery doctor``: checks what this machine can do, and shows the command that installs what is missing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from rookery import machine
from rookery.cli.options import FAILED, Cli, folder_option, with_options
from rookery.cli.output import print_json, show
from rookery.client import Client, Record
from rookery.cluster.base import PRELOAD, preloaded
from rookery.errors import RookeryError, UserError, installs
from rookery.folders import expanded
from rookery.settings import Settings, variable_notes
from rookery.tokenization.registry import status

GIGABYTE = 1 << 30

NEEDED_MEMORY = 3 * GIGABYTE
"""A 135M model in bf16 for decoding and training, its caches, and the service: measured about 2.5 GB."""

NEEDED_DISK = 4 * GIGABYTE
"""The smallest model with its cache, and the versions of a few jobs."""

ALLOCATOR_PACKAGE = "apt install libtcmalloc-minimal4 (Debian, Ubuntu), or gperftools-libs, or gperftools"

SERVICE_SECONDS = 3.0
"""Longest silence of a service that works."""

GPU_SECONDS = 30.0
"""Longest silence of a graphics driver that works: its first answer loads it."""

EXTRAS = {
    "gguf": "reads the packaged SmolLM2 where no hub can be reached",
    "math": "the math verifier",
    "reasoning-gym": "the reasoning-gym environments",
    "search": "the tool search",
    "agents": "the client that an agent gets",
    "postgres": "PostgreSQL",
    "s3": "artifacts in an object store",
    "ray": "workers on the nodes of a Ray cluster",
    "vllm": "vLLM as a worker's engine",
    "tinker": "clients of the tinker SDK",
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "otel": "traces of episodes to a collector",
}
"""The purpose of each extra; this package's metadata lists its packages."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``fix`` is the command or action that fixes it, empty where nothing is wrong; a missing
    optional part is not a fault."""

    what: str
    state: Literal["good", "optional", "bad"]
    found: str
    fix: str = ""


@with_options
def doctor(
    cli: Cli,
    cache: Annotated[Path | None, folder_option(help="The folder of base models.", envvar="ROOKERY_CACHE")] = None,
) -> None:
    """Check what this machine can do, and show how to fix what is missing. Exit code 1 if something required is."""
    wrong: list[Finding] = []
    try:
        settings = cli.every_setting()
    except UserError as error:
        settings = cli.settings
        wrong = [Finding("settings", "bad", str(error), "correct or unset the variable; its default is shown below")]
    if cache is not None:
        settings = settings.replace(cache=expanded(cache))
    findings = [*wrong, *(Finding("settings", "optional", note) for note in variable_notes()), *examine(settings)]
    if cli.json:
        print_json([asdict(finding) for finding in findings])
    for finding in [] if cli.json else findings:
        mark, style = {"good": ("ok", "green"), "optional": ("--", "yellow"), "bad": ("!!", "bold red")}[finding.state]
        show(Text.assemble((f"{mark}  ", style), f"{finding.what:<22} {finding.found}"))
        if finding.fix:
            show(Text(f"    {'':<22} → {finding.fix}", "dim"))
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(FAILED)


def examine(settings: Settings) -> list[Finding]:
    models = [name.strip() for name in settings.server.models.split(",") if name.strip()]
    return [
        Finding("Python", "good", platform.python_version()),
        _torch(),
        Finding("cores", "good", str(machine.cores())),
        bf16_finding(_processor_flags()),
        kernels_finding(_processor_flags(), sys.platform, find_spec("numba") is not None),
        _memory(settings),
        accelerator_finding(shutil.which("nvidia-smi")),
        _allocator(settings.worker.allocator),
        _disk("data folder", settings.data, "ROOKERY_DATA"),
        _disk("cache folder", settings.cache, "ROOKERY_CACHE"),
        *_refused(settings),
        *(_model(settings.cache, name) for name in models),
        *(_extra(extra, use) for extra, use in EXTRAS.items()),
        *service_findings(settings),
    ]


def _torch() -> Finding:
    try:
        return Finding("PyTorch", "good", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("PyTorch", "bad", "not installed; workers need it", f"{sys.executable} -m pip install torch")


def _processor_flags() -> set[str] | None:
    """The processor's instruction sets; None where the system does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return None


def bf16_finding(flags: set[str] | None) -> Finding:
    """Whether a processor with these instruction sets computes in bf16."""
    if flags is None:
        return Finding("bf16 instructions", "optional", "not reported by this system; a worker detects them")
    names = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags]
    if names:
        return Finding("bf16 instructions", "good", ", ".join(names))
    return Finding("bf16 instructions", "optional", "none: models run in float32, slower and with twice the memory")


def kernels_finding(flags: set[str] | None, system: str, has_numba: bool) -> Finding:
    """Whether the compiled kernels of a CPU's engine run: on Linux, with these instruction sets, and with numba."""
    name, otherwise = "CPU kernels", "PyTorch's operations decode instead, about half as fast"
    if system != "linux" or flags is None or not {"avx2", "fma"} <= flags:
        return Finding(name, "optional", f"none for this machine (they need Linux, x86-64, AVX2): {otherwise}")
    if not has_numba:
        return Finding(
            name, "optional", f"numba is not installed: {otherwise}", f"{sys.executable} -m pip install numba"
        )
    wide = "AVX-512" if "avx512f" in flags else "AVX2"
    return Finding(name, "good", f"{wide}, compiled at a worker's first start")


def _memory(settings: Settings) -> Finding:
    memory = machine.memory()
    budget = settings.worker.memory_bytes or settings.worker.memory_share * memory.free
    free = f"{memory.free / GIGABYTE:.1f} of {memory.total / GIGABYTE:.1f} GB free"
    text = f"{free}; workers started now get {budget / GIGABYTE:.1f} GB"
    return _room("memory", text, memory.free, NEEDED_MEMORY, "for the smallest model")


def _room(what: str, text: str, free: int, needed: int, where: str) -> Finding:
    if free < needed:
        return Finding(what, "bad", text, f"free {needed / GIGABYTE:.0f} GB {where}")
    return Finding(what, "good", text)


def accelerator_finding(program: str | None, seconds: float = GPU_SECONDS) -> Finding:
    """``program`` is that of the driver, which may be silent for ``seconds``."""
    if program is None:
        return Finding("GPU", "optional", "none found (no nvidia-smi); the CPU does the work")
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=seconds, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return Finding("GPU", "optional", f"nvidia-smi does not answer within {seconds:g} s", "repair the driver")
    if done.returncode != 0 or not done.stdout.strip():
        output, *_ = [*(done.stdout or done.stderr).strip().splitlines(), "no output"]
        return Finding("GPU", "optional", f"nvidia-smi fails: {output}", "repair the driver")
    return Finding("GPU", "good", "; ".join(line.strip() for line in done.stdout.strip().splitlines()))


def _allocator(name: str) -> Finding:
    if not name:
        return Finding("allocator", "optional", "the C library's, by ROOKERY_ALLOCATOR; tcmalloc is faster")
    if found := preloaded({}, name).get(PRELOAD):
        return Finding("allocator", "good", found)
    return Finding("allocator", "optional", f"no {name} here: workers are some 10% slower", ALLOCATOR_PACKAGE)


def _disk(what: str, folder: Path, variable: str) -> Finding:
    existing = folder
    while not os.path.exists(existing):  # unlike Path's, also false below a folder that may not be entered
        existing = existing.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(what, "bad", f"{folder} cannot be written", f"set {variable} to a writable folder")
    free = shutil.disk_usage(existing).free
    return _room(what, f"{folder} ({free / GIGABYTE:.1f} GB free)", free, NEEDED_DISK, "there")


def _refused(settings: Settings) -> Iterator[Finding]:
    """Why a service would not start with these settings."""
    from rookery.server.launcher import SETTING_CHECKS, plan_of  # half a second

    for refuse in (*SETTING_CHECKS, plan_of):
        try:
            refuse(settings)
        except UserError as error:
            yield Finding("settings", "bad", str(error), "rookery serve refuses this")


def _model(cache: Path, name: str) -> Finding:
    known = status(cache, name)
    if known.state == "prepared":
        return Finding(f"model {name}", "good", f"prepared in {known.folder}")
    if known.state == "refused":
        return Finding(f"model {name}", "bad", known.reason, "set ROOKERY_MODELS to a model that can be used")
    return Finding(f"model {name}", "optional", "fetched at first use", f"rookery models --get {name}")


def _extra(extra: str, use: str) -> Finding:
    wanted = [need for need in importlib.metadata.requires("rookery") or [] if need.endswith(f'; extra == "{extra}"')]
    packages = [re.split(r"[^\w.-]", need)[0] for need in wanted]
    try:
        found = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
        return Finding(f"extra {extra}", "good", found)
    except importlib.metadata.PackageNotFoundError:
        return Finding(f"extra {extra}", "optional", f"not installed: {use}", installs(extra))


def service_findings(settings: Settings, seconds: float = SERVICE_SECONDS) -> list[Finding]:
    """Whether the service answers within ``seconds``, and the memory of its workers if this key may see them."""
    workers: list[Record] = []
    try:
        with Client(settings=settings, seconds=seconds) as client:
            if client.health()["status"] == "standby":
                return [Finding("service", "good", f"standby at {settings.base_url}: another one has the database")]
            client.views()
            with contextlib.suppress(RookeryError):
                workers = client.workers()
    except RookeryError as error:
        return [Finding("service", "optional", str(error))]
    found = [Finding("service", "good", f"answers at {settings.base_url}")]
    for beat in [worker["beat"] for worker in workers if worker["state"] == "serving" and worker["beat"]]:
        parts = [f"{name} {used >> 20}/{budget >> 20}" for name, (used, budget) in sorted(beat["memory_parts"].items())]
        used, budget = (int(beat["gauges"].get(f"worker_memory_{name}") or 0) for name in ("bytes", "budget_bytes"))
        text = f"{used >> 20} of {budget >> 20} MB: {', '.join(parts)}"
        found.append(Finding("worker memory", "good", text))
    return found
