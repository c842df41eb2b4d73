"""The trainer over models of transformers: against PEFT in each family, against the native trainer, and its tenants
packed against alone.

In float32. Gradients agree with those of PEFT, one sequence at a time, within 5e-5 of their largest entry (linear
attention: 5e-4, for it sums over the padded length), log-probabilities within 5e-5.
"""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from tests.support.families import FAMILIES, small_config, small_model
from tests.worker.trainer.test_trainer import (
    close,
    exported,
    finish,
    forward_backward,
    gradient,
    masters,
    optim,
    ref,
    units,
)
from torch import Tensor

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.model.adapter import PARTS, init_adapter, read_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.published import fuse
from rookery.worker.model.transformers_model import TransformersModel
from rookery.worker.trainer.hf.trainer import TransformersBackbone
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.optim import AdapterExport
from rookery.worker.trainer.packed_pass import PassLimits
from rookery.worker.trainer.packed_trainer import PackedTrainer

RANKS = {"p": 4, "r": 7}


def write(folder: Path, model: TransformersModel, rank: int, seed: int) -> Path:
    """An adapter of every projection, with B ≠ 0."""
    folder.mkdir(parents=True)
    adapter = init_adapter(model.projections, rank, 2.0 * rank, PARTS, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, b in adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    AdapterExport(adapter).write(folder)
    return folder


def made(model: TransformersModel, folders: dict[str, Path], *, limits: PassLimits | None = None) -> PackedTrainer:
    backbone = TransformersBackbone(model)
    backbone.limits = limits or backbone.limits
    trainer = PackedTrainer(backbone, max_rank=16, slice_tokens=4096)
    for policy, folder in folders.items():
        trainer.load(policy, 1, ref(policy), folder)
    return trainer


def by_peft(family: str, folder: Path, seed: int) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients by PEFT's names and loss tokens' log-probs of AIPO, each sequence alone, the model's own attention."""
    config = small_config(family)
    config._attn_implementation = "eager"
    model = peft.PeftModel.from_pretrained(small_model(family, config), folder, is_trainable=True).eval()
    logprobs: list[float] = []
    for one in units(seed):
        for m in one.members:
            scores = torch.log_softmax(model(torch.tensor([one.prompt + m.tokens])).logits[0].double() / 0.7, -1)
            logp = scores[len(one.prompt) - 1 : -1].gather(1, torch.tensor(m.tokens)[:, None])[:, 0]
            q, a, w = (torch.tensor(x, dtype=torch.float64) for x in (m.logprobs, m.advantages, m.weights))
            (-w * (logp.detach() - q).exp().clamp(max=4.0) * a * logp).sum().backward()
            logprobs += [x for x, weight in zip(logp.tolist(), m.weights, strict=True) if weight]
    found = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_tenants_equal_peft_alone(tmp_path: Path, family: str) -> None:
    """Two policies in one pass, prompts shared where the model allows it; layers kept, and recomputed."""
    model = TransformersModel(small_model(family))
    folders = {p: write(tmp_path / p, model, rank, i) for i, (p, rank) in enumerate(RANKS.items())}
    kept = made(model, folders)
    recomputed = made(model, folders, limits=PassLimits(1, 10_000))
    expected = [by_peft(family, folders[policy], seed) for seed, policy in enumerate(RANKS)]
    for trainer in (kept, recomputed):
        for seed, policy in enumerate(RANKS):
            batch = protocol.TrainingBatch(groups=units(seed))
            trainer.forward_backward(forward_backward(policy, op=policy, logprobs=True), batch)
        assert trainer.queue.step()
        done = {result.op: result for result, _ in trainer.queue.drain()}
        assert set(done) == set(RANKS)  # it was one pass
        share = 5e-4 if family.startswith("qwen3_5") else 5e-5
        for policy, (wanted, logprobs) in zip(RANKS, expected, strict=True):
            given = torch.frombuffer(bytearray(done[policy].logprobs), dtype=torch.float32)
            assert given.tolist() == pytest.approx(logprobs, abs=5e-5)
            state = trainer.held[policy].state
            names = {f"{layer}.{part}.{side}" for layer, part in model.projections.shapes for side in "AB"}
            assert len(wanted) == len(names)
            largest = max(float(g.abs().max()) for g in wanted.values())
            for name, got in state.named_gradients():
                layer, _, rest = name.partition(".")
                part, _, side = rest.rpartition(".")
                suffix = f".layers.{layer}.{part}.lora_{side}.weight"
                (want,) = [g for key, g in wanted.items() if _full(key) == suffix]
                assert (got - want).abs().max() <= share * largest


def _full(key: str) -> str:
    """PEFT's name of a weight with the native names of parts."""
    for part in PARTS:
        key = key.replace(f"{'self_attn' if part in 'qkvo' else 'mlp'}.{part}_proj.", f"{part}.")
    return key[key.index(".layers.") :]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equals_the_native_trainer(tmp_path: Path, family: str) -> None:
    """Metrics, gradients, a step and its files: a policy may move between the two."""
    published = small_model(family)
    model = TransformersModel(small_model(family))
    folder = write(tmp_path / "p", model, 4, 1)
    config = DecoderConfig.from_hf(published.config.to_dict())
    native = PackedTrainer(
        NativeBackbone(Decoder(config, fuse(config, published.state_dict()))), max_rank=16, slice_tokens=4096
    )
    native.load("p", 1, ref("p"), folder)
    ours = made(model, {"p": folder})
    done = {}
    soft = protocol.Datum(tokens=[5, 9, 3], rows=[0, 2, 2, 2], targets=[9, 4, 4, 1], advantages=[1.0, 0.5, -2.0, 0.1])
    for trainer in (native, ours):
        for op, data in (("fb", []), ("soft", [soft])):
            one = forward_backward(op=op, kl_weight=0.1, operations=int(op == "soft"))
            trainer.forward_backward(one, protocol.TrainingBatch(groups=units(0), data=data))
        results = finish(trainer)
        done[trainer] = {f"{op} {name}": value for op, one in results.items() for name, value in one.metrics.items()}
    for name, value in done[native].items():
        assert "seconds" in name or done[ours][name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    close(gradient(ours), gradient(native))
    files = []
    for number, trainer in enumerate((native, ours)):
        trainer.optim_step(optim(upload="ticket", operations=2))
        export = exported(trainer)
        written = tmp_path / str(number)
        written.mkdir()
        files.append(export.write(written))
    assert files[0] == files[1]
    assert (masters(ours) - masters(native)).abs().max() < 2e-6
    native.load("p", 2, ref("p", "v1"), tmp_path / "1")
    assert torch.equal(masters(native), masters(ours))


def test_nan_of_a_tenant_touches_no_other(tmp_path: Path) -> None:
    """In a mixture of experts, where tokens of all tenants meet in the experts."""
    model = TransformersModel(small_model("qwen3_moe"))
    folders = {p: write(tmp_path / p, model, 4, i) for i, p in enumerate("xy")}
    gradients = []
    for broken in (False, True):
        trainer = made(model, folders)
        if broken:
            for site in trainer.held["x"].state.sites.values():
                site.a.fill_(float("nan"))
        for policy in "xy":
            trainer.forward_backward(forward_backward(policy, op=policy), protocol.TrainingBatch(groups=units(0)))
            trainer.optim_step(optim(policy, op=f"opt {policy}"))
        while len(gradients) < 2 and trainer.queue.step() and trainer.held["y"].operations == 0:
            pass
        gradients.append(gradient(trainer, "y"))
        done = finish(trainer)
        assert done["opt x"].metrics["skipped"] == float(broken) and done["opt y"].metrics["skipped"] == 0
    close(gradients[1], gradients[0])


def test_targets_and_other_adapters_are_refused_with_a_reason(tmp_path: Path) -> None:
    experts = TransformersModel(small_model("qwen3_moe"))
    with pytest.raises(UserError, match=r"no projection 'down'.*it has q, k, v, o"):
        init_adapter(experts.projections, 4, 8.0, ["q", "down"], 0)
    dense = write(tmp_path / "dense", TransformersModel(small_model("qwen3")), 4, 0)
    with pytest.raises(UserError, match="no projection of this base model"):
        read_adapter(dense, experts.projections)
    linear = TransformersModel(small_model("qwen3_5_text"))
    assert {"linear_attn.in_proj_qkv", "linear_attn.out_proj", "q", "gate"} <= {
        part for _, part in linear.projections.shapes
    }
