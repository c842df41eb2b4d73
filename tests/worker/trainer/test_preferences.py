"""DPO against a reference that is written with PEFT and autograd, a sequence at a time. Tolerances as in
``test_trainer``."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import msgspec
import peft
import pytest
import torch
from tests.support.families import flat_lora
from tests.worker.trainer.test_trainer import (
    HF,
    LLAMA,
    adapter_folder,
    close,
    decoder,
    finish,
    forward_backward,
    gradient,
    published,
    ref,
    trainer,
)

from rookery import protocol
from rookery.worker.trainer.packed_pass import PassLimits

BETA = 0.3
DPO = protocol.Loss(name="dpo", params={"beta": BETA})
START = msgspec.structs.replace(ref("p"), hash="start")


def reply(rng: random.Random, length: int, sign: float) -> protocol.GroupMember:
    return protocol.GroupMember(
        tokens=[rng.randrange(HF["vocab_size"]) for _ in range(length)], logprobs=[0.0] * length,
        advantages=[sign] * length, weights=[1.0] * length,
    )  # fmt: skip


def pairs(
    seed: int, lengths: tuple[tuple[int, int, int], ...] = ((7, 5, 9), (1, 1, 12), (20, 30, 2))
) -> list[protocol.SharedPrefixGroup]:
    rng = random.Random(seed)
    return [
        protocol.SharedPrefixGroup(
            prompt=[rng.randrange(HF["vocab_size"]) for _ in range(prompt)],
            members=[reply(rng, chosen, 1.0), reply(rng, rejected, -1.0)],
        )
        for prompt, chosen, rejected in lengths
    ]


def by_autograd(folder: Path, start: Path | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the pairs; the reference is the adapter in ``start``, or the base model."""
    model = peft.PeftModel.from_pretrained(published(), folder, is_trainable=True)
    if start is not None:
        model.load_adapter(start, "start")

    def logprob(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        scores = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].double(), -1)
        return scores[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None]).sum()

    total = 0.0
    for one in pairs(0):
        model.set_adapter("start" if start is not None else "default")
        with torch.no_grad(), nullcontext() if start is not None else model.disable_adapter():
            before = [logprob(one.prompt, m.tokens) for m in one.members]
        model.set_adapter("default")
        after = [logprob(one.prompt, m.tokens) for m in one.members]
        margin = BETA * ((after[0] - before[0]) - (after[1] - before[1]))
        loss = -torch.nn.functional.logsigmoid(margin)
        loss.backward()
        total += loss.item()
    found = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None and ".default." in n}
    return total, found


@pytest.mark.parametrize("warm", [False, True], ids=["base", "start"])
@pytest.mark.parametrize("slice_tokens", [4096, 16])
def test_loss_and_gradient_equal_those_of_autograd(tmp_path: Path, warm: bool, slice_tokens: int) -> None:
    """Also where a pair is longer than a slice: it stays whole."""
    policy, start = adapter_folder(tmp_path / "p", 4, 1), adapter_folder(tmp_path / "start", 4, 2)
    at = trainer(decoder(), {"p": policy}, slice_tokens=slice_tokens)
    if warm:
        at.load_reference("p", START, start)
    given = {"loss": DPO, "temperature": 1.0, "reference": START if warm else None}
    batch = protocol.TrainingBatch(groups=pairs(0))
    at.forward_backward(forward_backward(op="look", forward_only=True, **given), batch)
    at.forward_backward(forward_backward(**given), batch)
    done = finish(at)
    total, found = by_autograd(policy, start if warm else None)
    assert done["fb"].metrics["pairs"] == 3
    for op in ("look", "fb"):
        assert done[op].metrics["loss:sum"] == pytest.approx(total, rel=1e-4)
    close(gradient(at), flat_lora(found, LLAMA.num_hidden_layers), share=1e-4)


def test_two_policies_of_pairs_share_a_pass(tmp_path: Path) -> None:
    folders = {name: adapter_folder(tmp_path / name, 4, i) for i, name in enumerate("xy")}
    given = {"loss": DPO, "temperature": 1.0}
    together = trainer(decoder(), folders, slice_tokens=4096)
    for number, name in enumerate(folders):
        batch = protocol.TrainingBatch(groups=pairs(number))
        together.forward_backward(forward_backward(name, op=name, **given), batch)
    assert together.queue.step() and together.queue.pending == 0, "one pass"
    for number, name in enumerate(folders):
        alone = trainer(decoder(), {name: folders[name]})
        alone.forward_backward(forward_backward(name, **given), protocol.TrainingBatch(groups=pairs(number)))
        finish(alone)
        close(gradient(together, name), gradient(alone, name))


def test_a_batch_without_pairs_fails_and_one_beyond_memory_is_lost(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "p", 4, 1)
    at = trainer(decoder(), {"p": folder}, limits=PassLimits(resident_tokens=64, max_tokens=40))
    lonely = pairs(0, ((4, 3, 2),))
    lonely[0].members.pop()
    for groups, category in ((lonely, "failed"), (pairs(0, ((10, 20, 20),)), "lost")):
        at.forward_backward(forward_backward(loss=DPO), protocol.TrainingBatch(groups=groups))
        assert finish(at)["fb"].category == category
