"""Offloaded training states in main memory: restored exactly, within a bounded size."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.worker.trainer.test_trainer import (
    adapter_folder,
    decoder,
    finish,
    forward_backward,
    masters,
    optim,
    ref,
    trainer,
    units,
)

from rookery import protocol
from rookery.worker.trainer.native.state_cache import TrainerStateCache
from rookery.worker.trainer.native.trainer import NativeTrainer


def step(at: NativeTrainer, parent: str, seed: int, *, lease: int = 1, commit: str = "") -> None:
    batch = protocol.TrainingBatch(groups=units(seed))
    at.forward_backward(forward_backward(parent=ref("p", parent), lease=lease), batch)
    at.optim_step(optim(parent=ref("p", parent), lease=lease, commit=commit))
    done = finish(at)
    assert not done["fb"].error and not done["opt"].error
    if commit:
        at.mark_committed("p", lease, ref("p", commit))


def test_restored_state_is_equal_bit_for_bit_without_its_gradient(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 3)
    stays, goes = (trainer(decoder(), {"p": folder}, trainer_state_cache_bytes=1 << 30) for _ in range(2))
    for at in (stays, goes):
        step(at, "v0", 0, commit="v1")
    goes.forward_backward(forward_backward(parent=ref("p", "v1"), op="begun"), protocol.TrainingBatch(groups=units(5)))
    finish(goes)
    goes.offload("p")
    assert not goes.holds("p", 1, "v1", 0) and len(goes.cache) == 1
    assert not goes.restore("p", 2, ref("p", "v0")), "it is v1"
    assert goes.restore("p", 2, ref("p", "v1"))
    assert goes.holds("p", 2, "v1", 0) and len(goes.cache) == goes.cache.bytes == 0
    for at, lease in ((stays, 1), (goes, 2)):
        step(at, "v1", 1, lease=lease)
    mine, wanted = goes.held["p"].state, stays.held["p"].state
    for name in ("masters", "exp_avg", "exp_avg_sq", "_compute"):
        assert torch.equal(getattr(mine, name), getattr(wanted, name)), name
    assert mine.step == wanted.step == 2


def test_untrained_state_is_restored(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)}, trainer_state_cache_bytes=1 << 30)
    before = masters(at)
    at.offload("p")
    assert at.restore("p", 2, ref("p"))
    assert torch.equal(masters(at), before)
    step(at, "v0", 0, lease=2)


def test_state_that_is_no_version_is_not_kept(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)}, trainer_state_cache_bytes=1 << 30)
    step(at, "v0", 0)
    at.offload("p")
    assert len(at.cache) == 0
    at.offload("nobody")
    other = trainer(decoder(), {"p": adapter_folder(tmp_path / "q", 4, 3)})  # no room by default
    other.offload("p")
    assert len(other.cache) == 0 and not other.restore("p", 2, ref("p"))


def test_least_recently_used_states_are_evicted_first(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    state = at.held["p"].state.export()
    aside = TrainerStateCache(2 * state.bytes)
    assert state.bytes == 4 * len(masters(at))
    for name in ("a", "b"):
        aside.put(name, state)
    taken = aside.pop("a")
    assert taken is state and aside.pop("a") is None
    for name in ("a", "c"):
        aside.put(name, state)
    assert aside.bytes == 2 * state.bytes
    assert [aside.pop(name) is not None for name in ("a", "b", "c")] == [True, False, True]
    aside.put("a", state)
    aside.put("a", state)
    assert (len(aside), aside.bytes) == (1, state.bytes)
    aside.clear()
    assert (len(aside), aside.bytes) == (0, 0)
