"""How old a result is: whether the code that it measures has changed since, and whether this history has its commit.
Computed from git; without git a result has no marks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import ROOT

ENGINE = ("worker/engine", "worker/model", "worker/core.py", "worker/compute.py")
TRAINER = ("worker/trainer", "worker/model", "algorithms")
JOBS = ("worker", "controller", "scheduling", "algorithms", "environments", "storage", "protocol")
SERVICE = (*JOBS, "server")
CONTROLLER = ("controller", "scheduling", "simulation", "storage")
STORE = ("worker/transfer", "controller/weights", "scheduling/replication.py")
LEARNING = ("worker/trainer", "worker/engine", "algorithms", "controller/jobs", "environments")
ROOMS: dict[str, tuple[str, ...]] = {
    "agentic": JOBS,
    "buffer_order": ("scheduling/job_rules.py",),
    "callers": SERVICE,
    "chaos_mutations": CONTROLLER,
    "chaos_ray": ("cluster", "worker", "controller"),
    "cookbook": SERVICE,
    "earlier": (*ENGINE, *TRAINER),
    "elastic": ("scheduling/elastic.py", "simulation/elastic.py"),
    "engines": JOBS,
    "fine_tuning": JOBS,
    "generation": ENGINE,
    "grpo_step": JOBS,
    "jigsaw": ("scheduling/pipelines.py", "scheduling/tails.py", "controller/rollout", "simulation"),
    "lanes": ("worker", "scheduling/pipelines.py"),
    "logprob_agreement": (*ENGINE, *TRAINER),
    "machines_fsdp": TRAINER,
    "machines_ray": ("cluster", "worker"),
    "machines_workers": JOBS,
    "many_jobs": JOBS,
    "memory": ("worker",),
    "memory_controller": LEARNING,
    "multiplex": (*ENGINE, *TRAINER),
    "neighbours": ("worker",),
    "other_families": (*ENGINE, *TRAINER),
    "page_scale": ("server", "controller", "storage"),
    "plan_measured": ("scheduling/plan", "worker", "controller"),
    "planning": ("scheduling/plan", "simulation"),
    "routing": ("algorithms", "environments/xrouter.py"),
    "seer": ("scheduling", "controller/rollout", "controller/fleet", "simulation"),
    "service_floor": SERVICE,
    "serving": SERVICE,
    "serving_simulation": ("scheduling/slo.py", "scheduling/costs.py"),
    "shipped_worker": ("worker/connection.py", "worker/generation.py", "worker/training_ops.py", "simulation"),
    "soak": SERVICE,
    "soak_jobs": SERVICE,
    "solver_verifier": LEARNING,
    "speculation": (*ENGINE, "scheduling/speculation.py"),
    "tenants": CONTROLLER,
    "timeline_cost": ("telemetry", "worker", "controller/timeline.py", "controller/stored_spans.py", "storage"),
    "tinker_latency": SERVICE,
    "training": TRAINER,
    "weights": STORE,
    "weights_chain_270": STORE,
    "weights_chain_2000": STORE,
    "weights_direct": ("worker/transfer",),
    "weights_lora": ("worker/transfer/delta.py", "worker/trainer"),
    "word_game": LEARNING,
    "xrouter": LEARNING,
}
"""The parts of ``src/rookery`` that a measure measures, by its name; of others it is all."""

ABSENT = "not in this history"
CHANGED = "code changed since"
MARKS = re.compile(rf" \({ABSENT}\)|; {CHANGED} \(\d+ commits?\)")


def absent(result: Mapping[str, Any], root: Path = ROOT) -> bool:
    """Whether the history in ``root`` lacks the commit that was measured: it was rebased, or never left its machine."""
    commit = result["commit"].rstrip("+")
    within = commit and _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None
    return bool(commit and not within and _git(root, "rev-parse", "HEAD"))


def changes(result: Mapping[str, Any], root: Path = ROOT) -> int:
    """The commits since the one that was measured that touch the code it measures. Where this history lacks that
    commit, since the one that added the result; 0 for a result that no commit has."""
    start = result["commit"].rstrip("+")
    if absent(result, root):
        added = _git(root, "log", "--format=%H", f'-S"commit": "{result["commit"]}"', "--", "benchmarks/results")
        start = (added or "").rpartition("\n")[2]
    rooms = [f"src/rookery/{room}" for room in ROOMS.get(result["name"], ("",))]
    found = _git(root, "rev-list", "--count", f"{start}..HEAD", "--", *rooms) if start else None
    return int(found or 0)


def commit_of(result: Mapping[str, Any], root: Path = ROOT) -> str:
    """The commit, with a mark where this history lacks it."""
    return result["commit"] + f" ({ABSENT})" * absent(result, root)


def changed(result: Mapping[str, Any], root: Path = ROOT) -> str:
    """A mark where the code has changed since."""
    count = changes(result, root)
    return f"; {CHANGED} ({count} commit{'s' * (count > 1)})" if count else ""


def unmarked(page: str) -> str:
    """The page without the marks, which the next commit may change."""
    return MARKS.sub("", page)


def _git(root: Path, *arguments: str) -> str | None:
    """The output of a git command; None where it fails, or there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
