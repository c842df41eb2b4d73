"""The sharded trainer in two processes, against the native trainer and against plain PyTorch.

The model is small and random, in float32: gradients are sums in another order, so weights after AdamW steps agree
within 1e-5 (eps is 1e-3, or entries that are nothing but rounding would be whole steps of either sign).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.support.small_model import save_small_model

from rookery import protocol
from rookery.algorithms.losses import LOSSES
from rookery.errors import UserError
from rookery.worker.memory import NoRoom
from rookery.worker.model.convert import prepare
from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.base import Trainer
from rookery.worker.trainer.fsdp.group import GroupOptions, TrainingGroup
from rookery.worker.trainer.fsdp.trainer import FolderExport, FsdpTrainer
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.packed_trainer import PackedTrainer
from rookery.worker.trainer.packing import PackedGroup, plan_passes
from rookery.worker.transfer.cache import TRAINER_STATE, AdapterCache

TOLERANCE = 1e-5
ADAM = protocol.Adam(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1, clip=1.0)
AIPO = protocol.Loss(name="aipo", params={"rho": 4.0})
VOCAB = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared folder of a random model."""
    folder = tmp_path_factory.mktemp("model")
    return prepare(str(save_small_model(folder / "published")), folder / "cache")


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[TrainingGroup]:
    """Two processes, with activation checkpointing."""
    group = TrainingGroup(GroupOptions(2, model, torch.float32, recompute=True))
    yield group
    group.close()


def sharded(group: TrainingGroup, exports: Path, **given: object) -> FsdpTrainer:
    options: dict[str, object] = {
        "max_rank": 16, "slice_tokens": 64, "memory_bytes": 1 << 30, "max_tokens": 512,
    }  # fmt: skip
    return FsdpTrainer(lambda: group, group.options.model, exports=exports, **(options | given))  # type: ignore[arg-type]


def batch(seed: int) -> protocol.TrainingBatch:
    """Groups of several lengths, and a sequence with targets of its own."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    def member(length: int) -> protocol.GroupMember:
        return protocol.GroupMember(
            tokens=tokens(length),
            logprobs=[-6.0 - rng.random() for _ in range(length)],
            advantages=[rng.gauss(0, 1)] * length,
            weights=[0.0 if i % 4 == 3 else 0.1 for i in range(length)],
        )

    groups = [
        protocol.SharedPrefixGroup(prompt=tokens(prompt), members=[member(length) for length in tails])
        for prompt, tails in ((7, [5, 9, 1, 3]), (11, [4, 20, 17]), (1, [12]))
    ]
    datum = protocol.Datum(
        tokens=tokens(9), rows=[2, 2, 7], targets=tokens(3), logprobs=[-5.0] * 3, advantages=[0.5, -0.5, 1.0],
        weights=[0.2, 0.1, 0.3],
    )  # fmt: skip
    return protocol.TrainingBatch(groups=groups, data=[datum])


def ref(version: str, rank: int) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=0, hash=version, rank=rank, alpha=2.0 * rank)


def finish(trainer: Trainer) -> list[protocol.OperationDone]:
    while trainer.queue.step():
        pass
    return [done for done, _ in trainer.queue.drain()]


def start(trainer: Trainer, folder: Path, rank: int) -> None:
    """Create version 0 in ``folder`` and load it; its hash is ``v0``."""
    folder.mkdir()
    op = protocol.InitAdapter(op="init", policy="p", rank=rank, alpha=2.0 * rank, targets=["q", "v", "down"], seed=3)
    trainer.initial_version(op, None).write(folder)
    trainer.load("p", 1, ref("v0", rank), folder)


def take_step(
    trainer: Trainer, seed: int, rank: int, *, steps: int = 0, parent: str = "v0", to: Path | None = None,
    loss: protocol.Loss = AIPO, kl_weight: float = 0.0, reference: protocol.AdapterRef | None = None,
) -> list[protocol.OperationDone]:  # fmt: skip
    """A step on two batches; with ``to`` it is committed to that folder."""
    common = {"policy": "p", "lease": 1, "parent": ref(parent, rank), "steps": steps}
    for number in range(2):
        op = protocol.ForwardBackward(
            op=f"pass {number}", batch_ticket="", loss=loss, temperature=0.7, operations=number, logprobs=True,
            kl_weight=kl_weight, reference=reference, **common,
        )  # fmt: skip
        trainer.forward_backward(op, batch(2 * seed + number))
    trainer.optim_step(
        protocol.OptimStep(op="step", adam=ADAM, scale=0.5, operations=2, upload="c" if to else "", **common)
    )
    while trainer.queue.step():
        pass
    results, exports = zip(*trainer.queue.drain(), strict=True)
    assert [result.error for result in results] == ["", "", ""]
    if to is not None:
        to.mkdir()
        exports[-1].write(to)
    return [*results]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.name} {name}": tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = TOLERANCE) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name].float(), b[name].float(), rtol=0, atol=tolerance, msg=name)


def test_lora_over_a_sharded_base_steps_as_the_native_trainer(pair: TrainingGroup, model: Path, tmp_path: Path) -> None:
    native = PackedTrainer(NativeBackbone(Decoder.load(model, torch.float32)), max_rank=16, slice_tokens=64)
    results = []
    for trainer, name in ((native, "native"), (sharded(pair, tmp_path), "sharded")):
        start(trainer, tmp_path / name, 4)
        first = take_step(trainer, 0, 4, kl_weight=0.1)
        trainer.load_reference("p", ref("v0", 4), tmp_path / name)
        assert trainer.has_reference("p", "v0") and not trainer.has_reference("p", "v1")
        compared = {"kl_weight": 0.1, "reference": ref("v0", 4)}
        second = take_step(trainer, 1, 4, steps=1, to=tmp_path / f"{name} 2", **compared)  # type: ignore[arg-type]
        results.append([*first, *second])
    for theirs, ours in zip(*results, strict=True):
        assert ours.metrics.keys() == theirs.metrics.keys()
        for key in ours.metrics.keys() - {"seconds"}:
            assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-4, abs=1e-4), key
        logprobs = [torch.frombuffer(bytearray(r.logprobs), dtype=torch.float32) for r in (ours, theirs) if r.logprobs]
        if logprobs:
            torch.testing.assert_close(*logprobs, rtol=0, atol=1e-4)
    assert_close(weights(tmp_path / "sharded 2"), weights(tmp_path / "native 2"))
    # and the native trainer goes on from the sharded one's version
    native.load("p", 2, ref("other", 4), tmp_path / "sharded 2")


def reference_step(model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """:func:`take_step` on a whole model in plain PyTorch."""
    optimizer.zero_grad()
    for number in range(2):
        groups = [PackedGroup.from_group(group) for group in batch(2 * seed + number).groups]
        groups += [PackedGroup.from_datum(datum) for datum in batch(2 * seed + number).data]
        for sequence in (sequence for group in groups for sequence in group.sequences()):
            logits = model(torch.tensor([sequence.tokens])).logits[0, sequence.rows] / 0.7
            logp = logits.log_softmax(-1)[range(len(sequence.rows)), sequence.targets]
            columns = [torch.tensor(x) for x in (sequence.logprobs, sequence.advantages, sequence.weights)]
            LOSSES["aipo"](logp, *columns, torch.zeros(len(logp)).long(), rho=4.0).total.backward()
    for parameter in model.parameters():
        parameter.grad *= 0.5
    torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip)
    optimizer.step()


def test_full_parameters_step_as_in_one_process(pair: TrainingGroup, tmp_path: Path) -> None:
    trainer = sharded(pair, tmp_path)
    start(trainer, tmp_path / "v0", 0)
    take_step(trainer, 0, 0)
    take_step(trainer, 1, 0, steps=1, to=tmp_path / "v2")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "v0", dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )
    for seed in range(2):
        reference_step(model, optimizer, seed)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "v2", dtype=torch.float32)
    assert_close(trained.state_dict(), model.state_dict())
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "v0", dtype=torch.float32).state_dict()
    moved = max(float((trained.state_dict()[name] - before[name]).abs().max()) for name in before)
    assert moved > 100 * TOLERANCE


def test_a_slice_is_one_pass_of_a_group(pair: TrainingGroup, tmp_path: Path) -> None:
    """A member reads its copy of the prompt, so a group of many needs several passes."""
    trainer = sharded(pair, tmp_path)
    start(trainer, tmp_path / "v0", 4)
    member = protocol.GroupMember(tokens=[1, 2], logprobs=[-5.0] * 2, advantages=[1.0] * 2, weights=[1.0] * 2)
    members = [msgspec.structs.replace(member, tokens=[1, token]) for token in range(5)]
    op = protocol.ForwardBackward(
        op="f", batch_ticket="", loss=AIPO, temperature=1.0, logprobs=True, policy="p", lease=1, parent=ref("v0", 4),
        steps=0,
    )  # fmt: skip
    groups = [protocol.SharedPrefixGroup(prompt=list(range(50)), members=members)]
    trainer.forward_backward(op, protocol.TrainingBatch(groups=groups))
    trainer.forward_backward(msgspec.structs.replace(op, op="again", operations=1), batch(0))
    slices = []
    while len(slices) < 3 and trainer.queue.step():
        slices.append(sum(trainer.queue.tenant_tokens().values()))
    assert slices == [2 * 51, 2 * 51, 51], "the last token is not read; each process has 64"
    ((done, _),) = trainer.queue.drain()
    assert (done.op, done.error, done.metrics["tokens"], len(done.logprobs)) == ("f", "", 10, 4 * 10)
    assert [result.error for result in finish(trainer)] == [""] and trainer.trained > sum(slices)


def test_a_version_resumes_exactly(pair: TrainingGroup, tmp_path: Path) -> None:
    trainer = sharded(pair, tmp_path)
    start(trainer, tmp_path / "v0", 0)
    take_step(trainer, 0, 0, to=tmp_path / "v1")
    trainer.mark_committed("p", 1, ref("v1", 0))
    take_step(trainer, 1, 0, parent="v1", to=tmp_path / "v2")
    trainer.load("p", 1, ref("v1", 0), tmp_path / "v1")
    take_step(trainer, 1, 0, parent="v1", to=tmp_path / "again")
    assert_close(weights(tmp_path / "again"), weights(tmp_path / "v2"), 0.0)


def test_offloaded_state_is_restored_without_its_gradient(pair: TrainingGroup, tmp_path: Path) -> None:
    trainer = sharded(pair, tmp_path)
    start(trainer, tmp_path / "v0", 0)
    op = protocol.ForwardBackward(
        op="f", batch_ticket="", loss=AIPO, temperature=1.0, policy="p", lease=1, parent=ref("v0", 0),
        steps=0,
    )  # fmt: skip
    trainer.forward_backward(op, batch(9))
    finish(trainer)
    trainer.offload("p")
    assert not trainer.holds("p", 1, "v0", 0) and not trainer.restore("p", 1, ref("v7", 0))
    assert trainer.restore("p", 1, ref("v0", 0))
    take_step(trainer, 0, 0, to=tmp_path / "restored")
    trainer.load("p", 1, ref("v0", 0), tmp_path / "v0")
    take_step(trainer, 0, 0, to=tmp_path / "loaded")
    assert_close(weights(tmp_path / "restored"), weights(tmp_path / "loaded"), 0.0)


def test_a_loss_that_is_not_finite_skips_the_step(pair: TrainingGroup, tmp_path: Path) -> None:
    trainer = sharded(pair, tmp_path)
    start(trainer, tmp_path / "v0", 0)
    bad = batch(0)
    bad.groups[0].members[0].advantages[0] = float("nan")
    common = {"policy": "p", "lease": 1, "parent": ref("v0", 0), "steps": 0}
    op = protocol.ForwardBackward(op="f", batch_ticket="", loss=AIPO, temperature=1.0, **common)
    trainer.forward_backward(op, bad)
    trainer.optim_step(protocol.OptimStep(op="s", adam=ADAM, operations=1, **common))
    assert finish(trainer)[-1].metrics["skipped"] == 1
    take_step(trainer, 0, 0, to=tmp_path / "after")
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path / "after").values())


def test_step_whose_result_is_not_finite_is_skipped(pair: TrainingGroup, tmp_path: Path) -> None:
    """B is 0 at first, and so is the gradient of A: without eps its update is 0 / 0."""
    trainer, common = sharded(pair, tmp_path), {"policy": "p", "lease": 1, "parent": ref("v0", 4), "steps": 0}
    start(trainer, tmp_path / "v0", 4)
    op = protocol.ForwardBackward(op="f", batch_ticket="", loss=AIPO, temperature=1.0, **common)
    trainer.forward_backward(op, batch(0))
    adam = msgspec.structs.replace(ADAM, eps=0.0)
    trainer.optim_step(protocol.OptimStep(op="s", adam=adam, operations=1, **common))
    assert finish(trainer)[-1].metrics["skipped"] == 1
    take_step(trainer, 0, 4, to=tmp_path / "after")
    start(trainer, tmp_path / "again", 4)
    take_step(trainer, 0, 4, to=tmp_path / "without")
    assert_close(weights(tmp_path / "after"), weights(tmp_path / "without"), 0.0)


def test_errors_of_files_leave_the_group_in_use(pair: TrainingGroup, tmp_path: Path) -> None:
    trainer = sharded(pair, tmp_path / "exports")
    start(trainer, tmp_path / "v0", 0)
    (made(tmp_path / "a") / "state").write_text("no folder")
    (made(tmp_path / "b") / "model.safetensors").mkdir()  # no file
    for name in "ab":
        with pytest.raises((OSError, SafetensorError)):
            pair.call("export", tmp_path / name)
    take_step(trainer, 0, 0, to=tmp_path / "v1")
    (tmp_path / "v1" / f"{TRAINER_STATE}.metadata").write_bytes(b"damaged")
    with pytest.raises(UserError, match="state was not read"):
        trainer.load("p", 2, ref("v1", 0), tmp_path / "v1")
    assert trainer.memory()["training_states"].used == 0
    trainer.load("p", 1, ref("v0", 0), tmp_path / "v0")
    take_step(trainer, 0, 0)


def test_commit_that_cannot_be_written_is_lost_and_others_train(pair: TrainingGroup, tmp_path: Path) -> None:
    (tmp_path / "exports").write_text("no folder")
    trainer = sharded(pair, tmp_path / "exports")
    sharded(pair, tmp_path).initial_version(
        protocol.InitAdapter(op="init", policy="p", rank=0, alpha=0.0, targets=[], seed=3), None
    ).write(folder := made(tmp_path / "v0"))
    for policy, commit in (("p", "ticket"), ("q", "")):
        common = {"policy": policy, "lease": 1, "parent": ref("v0", 0), "steps": 0}
        trainer.load(policy, 1, ref("v0", 0), folder)
        trainer.optim_step(protocol.OptimStep(op=policy, adam=ADAM, upload=commit, **common))
        trainer.optim_step(protocol.OptimStep(op=f"{policy} 2", adam=ADAM, **(common | {"steps": 1})))
        results = finish(trainer)
        assert [result.category for result in results] == (["lost", "lost"] if commit else ["", ""])
        assert not commit or "Error" in results[0].error
        assert trainer.holds(policy, 1, "v0", 2) is not bool(commit)
        trainer.evict(policy)


def test_files_of_an_export_stay_where_other_workers_share_the_cache(tmp_path: Path) -> None:
    """They wait there to be sent, while other workers begin, which delete what dead processes have left."""
    cache = tmp_path / "adapters"
    export = FolderExport(cache, lambda folder: (folder / "model.safetensors").write_bytes(b"weights"))
    AdapterCache(cache, 1 << 30).delete_private_leftovers()
    assert export.write(made(tmp_path / "v1")) == ["model.safetensors"]
    del export
    assert list(cache.iterdir()) == [], "it ends with the object"


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_refusals(pair: TrainingGroup, tmp_path: Path) -> None:
    trainer = sharded(pair, tmp_path, memory_bytes=1 << 20)
    with pytest.raises(UserError, match=r"full-parameter policy of .* MB do not fit.*ROOKERY_MEMORY_BYTES"):
        start(trainer, tmp_path / "large", 0)  # already its version 0, before anything is sampled for it
    trainer = sharded(pair, tmp_path, max_rank=2)
    with pytest.raises(UserError, match="rank 4 is above this worker's max_rank 2"):
        start(trainer, tmp_path / "high", 4)
    trainer = sharded(pair, tmp_path)
    start(trainer, tmp_path / "v0", 0)
    common = {"policy": "p", "lease": 1, "parent": ref("v0", 0), "batch_ticket": "", "temperature": 1.0}
    cases = {
        "no base model": {"loss": AIPO, "kl_weight": 0.1, "steps": 0},
        "no loss is named": {"loss": protocol.Loss(name="x"), "steps": 0},
        "another state": {"loss": AIPO, "steps": 5},
    }
    for error, fields in cases.items():
        trainer.forward_backward(protocol.ForwardBackward(op="f", **common, **fields), batch(0))
        assert error in finish(trainer)[0].error
    trainer.forward_backward(protocol.ForwardBackward(op="f", loss=AIPO, steps=0, **common), batch(0))
    with pytest.raises(NoRoom):  # another policy waits for this one's operations
        trainer.load("q", 1, ref("v0", 0), tmp_path / "v0")
    trainer.evict("p")
    assert trainer.queue.drain()[0].done.category == "lost"
    trainer.load("q", 1, ref("v0", 0), tmp_path / "v0")
    small = sharded(pair, tmp_path, max_tokens=4)
    small.load("p", 1, ref("v0", 0), tmp_path / "v0")
    small.forward_backward(protocol.ForwardBackward(op="f", loss=AIPO, steps=0, **common), batch(0))
    [(result, _)] = small.queue.drain()
    assert result.category == "lost" and "the 4 that fit this worker's memory" in result.error


def test_plan_covers_every_sequence_once_within_the_slice() -> None:
    lengths = [3, 90, 17, 17, 5, 64, 1, 1, 30]
    passes = plan_passes(lengths, 2, 64)
    assert sorted(at for shares in passes for share in shares for at in share) == list(range(len(lengths)))
    for shares in passes:
        for share in shares:
            assert len(share) <= 1 or len(share) * max(lengths[at] for at in share) <= 64
