"""Offloaded training states in main memory: restored exactly, within a bounded size."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from tests.worker.trainer.test_trainer import (
    adapter_folder,
    decoder,
    exported,
    finish,
    forward_backward,
    masters,
    optim,
    ref,
    results,
    trainer,
    units,
)

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.memory import NoRoom, TooSmall
from rookery.worker.model.adapter import PARTS
from rookery.worker.trainer.optim import PolicyState
from rookery.worker.trainer.packed_trainer import PackedTrainer
from rookery.worker.trainer.states import EXPECTED_SECONDS, EXPORT_BYTES


def step(at: PackedTrainer, parent: str, seed: int, *, lease: int = 1, commit: str = "") -> None:
    batch = protocol.TrainingBatch(groups=units(seed))
    at.forward_backward(forward_backward(parent=ref("p", parent), lease=lease), batch)
    at.optim_step(optim(parent=ref("p", parent), lease=lease, upload=commit))
    done = finish(at)
    assert not done["fb"].error and not done["opt"].error
    if commit:
        at.mark_committed("p", lease, ref("p", commit))


def test_restored_state_is_equal_bit_for_bit_without_its_gradient(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 3)
    stays, goes = (trainer(decoder(), {"p": folder}) for _ in range(2))
    for at in (stays, goes):
        step(at, "v0", 0, commit="v1")
    goes.forward_backward(forward_backward(parent=ref("p", "v1"), op="begun"), protocol.TrainingBatch(groups=units(5)))
    finish(goes)
    goes.offload("p")
    assert not goes.holds("p", 1, "v1", 0) and len(goes.states.offloaded) == 1
    assert not goes.restore("p", 2, ref("p", "v0")), "it is v1"
    assert goes.restore("p", 2, ref("p", "v1"))
    assert goes.holds("p", 2, "v1", 0) and not goes.states.offloaded
    for at, lease in ((stays, 1), (goes, 2)):
        step(at, "v1", 1, lease=lease)
    mine, wanted = goes.held["p"].state, stays.held["p"].state
    for name in ("masters", "exp_avg", "exp_avg_sq", "_compute"):
        assert torch.equal(getattr(mine, name), getattr(wanted, name)), name
    assert mine.step == wanted.step == 2


def test_policies_of_ended_jobs_leave_nothing(tmp_path: Path) -> None:
    """Forty tiny jobs one after another, with room for all: the newest few states stay, a used one among them."""
    now, folder = 0.0, adapter_folder(tmp_path / "p", 4, 3)
    at = trainer(decoder(), {"p0": folder}, compiled=False, most_idle=4, clock=lambda: now)
    tensors = []
    for number in range(40):
        now += 2 * EXPECTED_SECONDS
        at.load(f"p{number}", 1, ref(f"p{number}", "v0"), folder)
        at.held["p0"].use()
        if number in (9, 39):
            gc.collect()
            tensors.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))
    assert set(at.held) == {"p0", *(f"p{number}" for number in range(36, 40))}
    assert tensors[1] <= tensors[0], tensors


def test_untrained_state_is_restored(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    before = masters(at)
    at.offload("p")
    assert at.restore("p", 2, ref("p"))
    assert torch.equal(masters(at), before)
    step(at, "v0", 0, lease=2)


def test_state_that_is_no_version_is_not_kept(tmp_path: Path) -> None:
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    step(at, "v0", 0)
    at.offload("p")
    assert not at.states.offloaded
    at.offload("nobody")


def test_state_without_the_optimizers_state_is_not_kept_and_takes_no_step(tmp_path: Path) -> None:
    """A helper's copy of a policy has zero moments: it answers for nothing but gradients for other workers."""
    at = trainer(decoder(), {"p": adapter_folder(tmp_path / "p", 4, 3)})
    at.load("p", 1, ref("p"), tmp_path / "p", optimizer=False)
    batch = protocol.TrainingBatch(groups=units(0))
    at.forward_backward(forward_backward(op="share", upload="ticket"), batch)
    at.forward_backward(forward_backward(op="other", operations=1), batch)
    at.optim_step(optim(operations=2))
    done = results(at)
    assert done["share"].export is not None and not done["share"].done.error
    assert [done[op].done.category for op in ("other", "opt")] == ["stale", "stale"]
    at.load("p", 1, ref("p"), tmp_path / "p", optimizer=False)
    at.offload("p")
    assert not at.restore("p", 2, ref("p")) and not at.held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_never_holds_a_state_is_reported_before_it_computes(tmp_path: Path, dtype: torch.dtype) -> None:
    """With the version that it is compared with, and the copy of a commit: another worker may have more."""
    folder, of = adapter_folder(tmp_path / "p", 16, 3), decoder(dtype=dtype)
    first = trainer(of, {"p": folder}).held["p"].state
    numbers, state = len(first.masters), first.bytes
    reference = PolicyState.bytes_for(numbers, dtype, trained=False)
    init = protocol.InitAdapter(op="init", policy="p", rank=16, alpha=32.0, targets=list(PARTS), seed=1)
    with pytest.raises(TooSmall, match="memory budget"):
        trainer(of, {}, memory_bytes=4 * numbers - 1).initial_version(init, None)
    trainer(of, {}, memory_bytes=4 * numbers).initial_version(init, None)
    least = state + reference + EXPORT_BYTES * numbers
    for missing in (1, reference):
        with pytest.raises(TooSmall, match="memory budget"):
            trainer(of, {"p": folder}, memory_bytes=least - missing).load_reference("p", ref("p"), folder)
    at = trainer(of, {"p": folder}, memory_bytes=least)
    at.load_reference("p", ref("p"), folder)
    op = forward_backward(kl_weight=0.1, reference=ref("p"))
    at.forward_backward(op, protocol.TrainingBatch(groups=units(0)))
    at.optim_step(optim(upload="v1"))
    assert not any(done.error for done in finish(at).values())


def test_copy_of_another_policy_needs_no_room_where_that_one_may_go(tmp_path: Path) -> None:
    now = 0.0
    large, small = adapter_folder(tmp_path / "large", 12, 1), adapter_folder(tmp_path / "small", 4, 2)
    sizes = trainer(decoder(), {"large": large, "small": small}).held
    states_bytes = sizes["small"].state.bytes + sizes["large"].state.bytes
    budget = states_bytes + EXPORT_BYTES * len(sizes["large"].state.masters)
    at = trainer(decoder(), {}, memory_bytes=budget, clock=lambda: now)
    for name, folder in (("large", large), ("small", small)):
        at.load(name, 1, ref(name), folder)
        now += 2 * EXPECTED_SECONDS
    at.load_reference("small", ref("small"), small)
    assert set(at.held) == {"small"}, "a commit of the large one would wait for ever"


def test_full_memory_evicts_offloaded_and_idle_states_and_waits_for_busy_ones(tmp_path: Path) -> None:
    now = 0.0
    folders = {name: adapter_folder(tmp_path / name, 4, 3) for name in "abcd"}
    size = trainer(decoder(), {"a": folders["a"]}).held["a"].state.bytes
    numbers = len(masters(trainer(decoder(), {"a": folders["a"]}), "a"))
    most = 2 * size + 2 * EXPORT_BYTES * numbers - 1  # one copy fits beside two states, two do not
    at = trainer(decoder(), {}, memory_bytes=most, clock=lambda: now)
    for name in "ab":
        at.load(name, 1, ref(name), folders[name])
    assert at.memory()["training_states"].used == 2 * size
    with pytest.raises(NoRoom):
        at.load("c", 1, ref("c"), folders["c"])  # an operation of a or b may be on its way
    assert set(at.held) == {"a", "b"}
    at.offload("b")
    at.load("c", 1, ref("c"), folders["c"])
    assert (set(at.held), len(at.states.offloaded)) == ({"a", "c"}, 1)
    for policy in "ac":
        op = forward_backward(policy=policy, parent=ref(policy), tenant=policy)
        at.forward_backward(op, protocol.TrainingBatch(groups=units(0)))
    now = 2.0
    with pytest.raises(NoRoom):
        at.load("d", 1, ref("d"), folders["d"])  # both have queued operations
    assert not any(done.error for done in finish(at).values())
    now = 6.0
    with pytest.raises(NoRoom):
        at.load("d", 1, ref("d"), folders["d"])  # both have a gradient
    at.optim_step(optim(policy="a", parent=ref("a"), tenant="a", upload="v1"))
    with pytest.raises(NoRoom):
        at.optim_step(optim(policy="c", parent=ref("c"), tenant="c", upload="v1"))  # one copy fits
    export = exported(at)
    del export
    at.optim_step(optim(policy="c", parent=ref("c"), tenant="c", upload="v1"))
    finish(at)
    now = 8.0
    at.load("d", 1, ref("d"), folders["d"])
    assert set(at.held) == {"c", "d"}, "a was used least recently"
    with pytest.raises(UserError, match="memory budget"):
        trainer(decoder(), {"a": folders["a"]}, memory_bytes=size)
