"""A version's canary: written by its trainer, what an engine of another kind computes for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.tiny import small

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.model.canary import CANARY_FILE, canary_tokens, mean_difference, read_canary
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.packed_trainer import PackedTrainer


def test_a_committed_version_has_the_log_probabilities_of_its_canary(tmp_path: Path) -> None:
    tokens = canary_tokens(lambda text: [ord(character) for character in text])
    trainer = PackedTrainer(NativeBackbone(small("llama")), max_rank=8, slice_tokens=256, canary=tokens)
    op = protocol.InitAdapter(op="i", policy="p", rank=4, alpha=8.0, targets=["q", "o"], seed=1)
    (first := tmp_path / "first").mkdir()
    trainer.initial_version(op, None).write(first)
    assert read_canary(first) == []
    parent = protocol.AdapterRef(policy="p", version=0, hash="h", rank=4, alpha=8.0)
    trainer.load("p", 1, parent, first)
    trainer.optim_step(
        protocol.OptimStep(op="s", policy="p", lease=1, parent=parent, steps=0, adam=None, upload="ticket")
    )
    trainer.queue.step()
    ((_, export),) = trainer.queue.drain()
    assert export is not None
    (second := tmp_path / "second").mkdir()
    assert CANARY_FILE in export.write(second)
    datum = protocol.Datum(
        tokens=tokens[:-1], rows=list(range(len(tokens) - 1)), targets=tokens[1:],
        **{name: [0.0] * (len(tokens) - 1) for name in ("logprobs", "advantages", "weights")},
    )  # fmt: skip
    forward = protocol.ForwardBackward(
        op="f", policy="p", lease=1, parent=parent, steps=0, batch_ticket="", loss=protocol.Loss(name="cross_entropy"),
        temperature=1.0, forward_only=True,
    )  # fmt: skip
    trainer.forward_backward(forward, protocol.TrainingBatch(data=[datum]))
    while trainer.queue.step():
        pass
    ((scored, _),) = trainer.queue.drain()
    expected = memoryview(scored.logprobs).cast("f").tolist()
    assert read_canary(second) == pytest.approx(expected, abs=1e-4)


def test_a_broken_canary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / CANARY_FILE
    for text in ("{", "{}", json.dumps({"logprobs": ["x"]})):
        path.write_text(text)
        with pytest.raises(UserError, match="is no canary"):
            read_canary(tmp_path)


def test_the_difference_is_per_token() -> None:
    assert mean_difference([1.0, 2.0], [1.5, 1.5]) == 0.5
