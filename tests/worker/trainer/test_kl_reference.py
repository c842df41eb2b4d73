"""The KL penalty to a version instead of the base model: its value and gradient, several policies in a pass, and what
happens while the version is not there. Tolerances as in ``test_trainer``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tests.worker.trainer.test_trainer import (
    adapter_folder,
    close,
    decoder,
    finish,
    forward_backward,
    gradient,
    ref,
    trainer,
    units,
)

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.trainer.optim import AdapterExport, PolicyState
from rookery.worker.trainer.packed_trainer import PackedTrainer

KL = 0.3
VERSION = msgspec.structs.replace(ref("p"), hash="start")


def batch(seed: int = 2) -> protocol.TrainingBatch:
    return protocol.TrainingBatch(groups=units(seed))


def logprobs(folder: Path, policy: str = "p") -> torch.Tensor:
    """Of the batch's loss tokens, under the adapter in ``folder``."""
    at = trainer(decoder(), {policy: folder})
    at.forward_backward(forward_backward(policy, op="only", forward_only=True), batch())
    return torch.frombuffer(bytearray(finish(at)["only"].logprobs), dtype=torch.float32).double()


def compared(at: PackedTrainer, folder: Path | None, policy: str = "p", **given: object) -> None:
    """Queue a pass with a KL penalty to the version in ``folder``, or to the base model."""
    if folder is not None:
        at.load_reference(policy, VERSION, folder)
    reference = VERSION if folder is not None else None
    at.forward_backward(
        forward_backward(policy, op=f"kl {policy}", kl_weight=KL, reference=reference, **given), batch()
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("slice_tokens", [256, 16])
def test_penalty_is_k3_to_the_version(tmp_path: Path, compiled: bool, slice_tokens: int) -> None:
    policy, start = adapter_folder(tmp_path / "p", 4, 1), adapter_folder(tmp_path / "start", 4, 2)
    at = trainer(decoder(), {"p": policy}, compiled=compiled, slice_tokens=slice_tokens)
    compared(at, start)
    metrics = finish(at)["kl p"].metrics
    gap = logprobs(start) - logprobs(policy)
    assert metrics["kl:sum"] == pytest.approx((gap.exp() - gap - 1).sum().item(), rel=1e-3)
    of_base = trainer(decoder(), {"p": policy}, compiled=compiled)
    compared(of_base, None)
    assert abs(finish(of_base)["kl p"].metrics["kl:sum"] - metrics["kl:sum"]) > 0.1 * metrics["kl:sum"]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_start_itself_has_no_penalty(tmp_path: Path, compiled: bool) -> None:
    """The first step after a warm start has the gradient of the loss alone."""
    folder = adapter_folder(tmp_path / "p", 4, 1)
    plain, at = (trainer(decoder(), {"p": folder}, compiled=compiled) for _ in range(2))
    plain.forward_backward(forward_backward(), batch())
    finish(plain)
    compared(at, folder)
    assert finish(at)["kl p"].metrics["kl:sum"] == pytest.approx(0, abs=1e-8)
    close(gradient(at), gradient(plain))


def test_a_version_with_the_outputs_of_the_base_has_its_penalty(tmp_path: Path) -> None:
    """B = 0, as version 0 without a warm start."""
    policy = adapter_folder(tmp_path / "p", 4, 1)
    zero = AdapterExport.read(adapter_folder(tmp_path / "zero", 4, 5), decoder().config)
    for _, b in zero.adapter.weights.values():
        b.zero_()
    zero.write(tmp_path / "zero")
    gradients = []
    for folder in (tmp_path / "zero", None):
        at = trainer(decoder(), {"p": policy})
        compared(at, folder)
        finish(at)
        gradients.append(gradient(at))
    close(*gradients)


def test_policies_with_and_without_a_version_share_a_pass(tmp_path: Path) -> None:
    """As if alone: one compares with a version, one with the base model, one has no penalty."""
    folders = {name: adapter_folder(tmp_path / name, 4, i) for i, name in enumerate("xyz")}
    start = adapter_folder(tmp_path / "start", 4, 9)
    alone = {}
    for name, version in (("x", start), ("y", None)):
        at = trainer(decoder(), {name: folders[name]})
        compared(at, version, name)
        alone[name] = finish(at)[f"kl {name}"].metrics["kl:sum"], gradient(at, name)
    at = trainer(decoder(), folders, slice_tokens=4096)
    compared(at, start, "x")
    compared(at, None, "y")
    at.forward_backward(forward_backward("z", op="z"), batch())
    assert at.queue.step() and at.queue.pending == 0, "one pass"
    done = {done.op: done for done, _ in at.queue.drain()}
    assert "kl:sum" not in done["z"].metrics
    for name, (penalty, wanted) in alone.items():
        assert done[f"kl {name}"].metrics["kl:sum"] == pytest.approx(penalty, rel=1e-4)
        close(gradient(at, name), wanted)


def test_a_pass_without_its_version_is_stale(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 1)
    at = trainer(decoder(), {"p": folder})
    assert not at.has_reference("p", "start")
    at.forward_backward(forward_backward(kl_weight=KL, reference=VERSION), batch())
    assert finish(at)["fb"].category == "stale"
    compared(at, folder)
    assert at.has_reference("p", "start") and not at.has_reference("p", "other")
    assert not finish(at)["kl p"].error
    other = msgspec.structs.replace(VERSION, hash="other")
    at.forward_backward(forward_backward(kl_weight=KL, reference=other, operations=1), batch())
    assert finish(at)["fb"].category == "stale", "another version is loaded"
    at.evict("p")
    at.load_reference("p", VERSION, folder)
    assert not at.has_reference("p", "start"), "it belongs to the policy's state"


def test_a_version_takes_its_compute_copies_of_the_memory(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 1)
    at = trainer(decoder(), {"p": folder})
    before, numbers = at.memory()["training_states"].used, at.held["p"].state.masters.numel()
    at.load_reference("p", VERSION, folder)
    needed = PolicyState.bytes_for(numbers, torch.float32, trained=False)
    assert at.memory()["training_states"].used == before + needed == before + 8 * numbers
    at.load_reference("p", VERSION, folder)
    assert at.memory()["training_states"].used == before + needed, "it replaces the other"
    with pytest.raises(UserError):
        at.load_reference("p", VERSION, tmp_path)
