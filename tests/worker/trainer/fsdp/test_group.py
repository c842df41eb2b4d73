"""Groups of one, two and four processes: versions that move between them, and a process that ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.worker.trainer.fsdp.test_trainer import assert_close, model, ref, sharded, start, take_step, weights

from rookery.worker.trainer.fsdp.group import GroupLost, GroupOptions, TrainingGroup

__all__ = ["model"]


@contextmanager
def group_of(processes: int, model: Path) -> Iterator[TrainingGroup]:
    group = TrainingGroup(GroupOptions(processes, model, torch.float32))
    try:
        yield group
    finally:
        group.close()


@pytest.mark.heavy
def test_versions_resume_on_other_numbers_of_processes(model: Path, tmp_path: Path) -> None:
    """Two steps by 2, then 1, then 4 processes equal those of one process throughout."""
    for name, sizes in (("changing", (2, 1, 4)), ("constant", (1, 1, 1))):
        parent = "v0"
        for step, processes in enumerate(sizes):
            with group_of(processes, model) as group:
                trainer = sharded(group, tmp_path)
                if step:
                    trainer.load("p", 1, ref(parent, 0), tmp_path / f"{name} {step - 1}")
                else:
                    start(trainer, tmp_path / name, 0)
                take_step(trainer, step, 0, parent=parent, to=tmp_path / f"{name} {step}")
                parent = f"v{step + 1}"
    assert_close(weights(tmp_path / "changing 2"), weights(tmp_path / "constant 2"))


@pytest.mark.heavy
def test_a_process_that_ends_loses_the_group(model: Path, tmp_path: Path) -> None:
    group = TrainingGroup(GroupOptions(2, model, torch.float32))
    trainer = sharded(group, tmp_path)
    start(trainer, tmp_path / "v0", 0)
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(GroupLost, match="process 1"):
        take_step(trainer, 0, 0)
    with pytest.raises(GroupLost):
        trainer.load("p", 2, ref("v0", 0), tmp_path / "v0")
    group.close()
