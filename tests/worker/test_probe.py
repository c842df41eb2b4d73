"""Each loaded model of transformers is tried: families that compute do so as transformers and PEFT do, all others are
refused in one line. In float32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from tests.support.families import TRIED, small_model, tiny_config
from tests.support.small_model import save_small_model

from rookery.errors import UserError
from rookery.settings import Settings
from rookery.tokenization import registry
from rookery.worker.core import load_core
from rookery.worker.engine.hf.runner import causal_attention, transformers_runner
from rookery.worker.model.adapter import PARTS, init_adapter, write_adapter
from rookery.worker.model.convert import main, prepare
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.transformers_model import TransformersModel
from rookery.worker.probe import Unfaithful, try_engine, try_trainer
from rookery.worker.trainer.hf.trainer import TransformersBackbone

QUICK = ("mixtral", "deepseek_v2", "qwen3_next", "gemma3_text")
"""A mixture of experts, latent attention, linear attention, windows."""

REFUSED = ("deepseek_v4", "diffllama", "falcon_mamba", "mamba", "llama4_text", "minimax", "recurrent_gemma")
"""Families that fail in different ways: other logits, or an exception."""


def tried(family: str) -> TransformersModel:
    """A small model that has passed what a worker tries."""
    model = TransformersModel(small_model(family, tiny_config(family)))
    loras = LoraManager(model.projections, model.dtype, model.device, 8)
    try_engine(model, transformers_runner(model, loras, 1 << 26), loras)
    assert not len(loras)
    try_trainer(model, TransformersBackbone(model))
    return model


def check(family: str, folder: Path) -> None:
    model = tried(family)
    adapter = init_adapter(model.projections, 4, 8.0, PARTS, 0)
    generator = torch.Generator().manual_seed(0)
    for _, b in adapter.weights.values():
        b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    write_adapter(folder, adapter)
    loras = LoraManager(model.projections, model.dtype, model.device, 8)
    loras.add("x", adapter)
    tokens = torch.arange(3, 20)
    config = tiny_config(family)
    config._attn_implementation = "eager"
    judge = peft.PeftModel.from_pretrained(small_model(family, config), folder).eval()
    with torch.no_grad():
        expected = judge(tokens[None], use_cache=False).logits[0]
        with model.adapted(loras.batch_product(["x"], [len(tokens)]), len(tokens), causal_attention):
            found = model.compute_logits(model.hidden(tokens[None])[0])
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("family", QUICK)
def test_a_model_of_another_family_computes_as_transformers_and_peft(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("family", TRIED)
def test_every_listed_family_computes_as_transformers_and_peft(family: str, tmp_path: Path) -> None:
    check(family, tmp_path)


def test_the_documentation_lists_the_families_that_were_tried() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"Tried\s+families:\s+([^.]+)\.", text)
    assert re.findall(r"`(\w+)`", listed) == TRIED
    (refused,) = re.findall(r"Refused\s+are\s+among\s+others\s+([^.]+)\.", text)
    assert set(REFUSED) <= {*re.findall(r"`(\w+)`", refused)}


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_computes_otherwise_is_not_accepted(family: str) -> None:
    with pytest.raises((Unfaithful, RuntimeError, ValueError, TypeError, AttributeError, UserError)):
        tried(family)


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["prefill", "decode", "adapter"])
def test_each_part_of_a_pass_is_tried(fault: str, number: torch.dtype) -> None:
    """A prompt, a decode step, and a LoRA, of a model that is otherwise right."""
    model = TransformersModel(small_model("mixtral", tiny_config("mixtral")).to(number))
    loras = LoraManager(model.projections, model.dtype, model.device, 8)
    runner = transformers_runner(model, loras, 1 << 26)
    try_engine(model, runner, loras)
    of, name = (loras, "batch_product") if fault == "adapter" else (runner, fault)
    original = getattr(of, name)

    def wrong(argument: Any, *counts: Any) -> Any:
        if fault == "adapter":
            return original(["" for _ in argument], *counts)
        result = original(argument)
        for values in result[:1] if fault == "prefill" else [result]:
            values.copy_(torch.randn(values.shape, generator=torch.Generator().manual_seed(0)))
        return result

    setattr(of, name, wrong)
    with pytest.raises(Unfaithful, match="logits"):
        try_engine(model, runner, loras)


def test_a_refused_model_is_refused_in_one_line_from_then_on(tmp_path: Path) -> None:
    """It is probed again once packages of other versions are installed, or the model is fetched again."""
    cache, published = tmp_path / "cache", save_small_model(tmp_path / "model", 0, tiny_config("diffllama"))
    folder = prepare(str(published), cache)
    assert registry.status(cache, str(published)).state == "prepared"
    with pytest.raises(UserError, match=r"cannot be trained here, .* \(its logits differ by \d+% ") as refusal:
        load_core(folder, Settings.load({}, cache=cache, device="cpu"), lambda: None)
    assert "\n" not in str(refusal.value) and str(cache) not in str(refusal.value)
    found = registry.status(cache, str(published))
    assert (found.state, found.reason) == ("refused", str(refusal.value))
    with pytest.raises(UserError, match="its logits differ"):
        registry.usable(cache, str(published))
    about = json.loads((folder / registry.REFUSED).read_text())
    (folder / registry.REFUSED).write_text(json.dumps(about | {"versions": about["versions"] | {"torch": "1.0"}}))
    assert registry.status(cache, str(published)).state == "prepared"
    (folder / registry.REFUSED).write_text(json.dumps(about))
    main([str(published), "--cache", str(cache)])
    assert registry.status(cache, str(published)).state == "prepared"


def test_a_model_without_a_context_length_is_refused_when_it_is_prepared(tmp_path: Path) -> None:
    """A family without attention. Nothing of it stays."""
    family = "mamba"
    published = save_small_model(tmp_path / family, 0, tiny_config(family))
    with pytest.raises(UserError, match=f"states no context length .*; {family} is not supported") as refusal:
        prepare(str(published), tmp_path / "cache")
    assert "\n" not in str(refusal.value) and str(tmp_path / "cache") not in str(refusal.value)
    assert registry.status(tmp_path / "cache", str(published)).state != "prepared"


def test_a_model_that_computes_is_loaded_and_named_in_its_adapters(tmp_path: Path) -> None:
    cache, published = tmp_path / "cache", save_small_model(tmp_path / "model", 0, tiny_config("mixtral"))
    core = load_core(prepare(str(published), cache), Settings.load({}, cache=cache, device="cpu"), lambda: None)
    assert (core.implementation.engine, core.engine.active, core.queue.pending) == ("transformers", 0, 0)
    assert not list(core.engine.adapters())
    core.engine.close()


def test_a_lack_of_memory_is_no_fault_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = save_small_model(tmp_path / "model", 0, tiny_config("mixtral"))
    folder = prepare(str(published), tmp_path / "cache")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.MixtralForCausalLM, "forward", fail)
    with pytest.raises(MemoryError):
        load_core(folder, Settings.load({}, cache=tmp_path / "cache", device="cpu"), lambda: None)
    assert registry.status(tmp_path / "cache", str(published)).state == "prepared"
