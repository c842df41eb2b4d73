"""Preparing and loading models that transformers computes, and the choice of engine and trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.families import SIZES, small_config
from tests.support.small_model import save_small_model

from rookery.errors import UserError
from rookery.tokenization.registry import Inspected, choose_backends, inspect, prepared_models, status
from rookery.worker.model.convert import prepare
from rookery.worker.model.transformers_model import TransformersModel


def config(family: str) -> transformers.PreTrainedConfig:
    if family == "gemma3":  # with a vision tower, which texts do not use
        text = {name: size for name, size in SIZES.items() if name != "pad_token_id"}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 16, "patch_size": 8}
        return transformers.Gemma3Config(text_config=text, vision_config=vision)
    return small_config(family)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_prepared_models_are_loaded_as_published(tmp_path: Path, family: str) -> None:
    """Also those whose weights the native decoder has fused."""
    published = save_small_model(tmp_path / family, 0, config(family))
    judge = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    for weight in judge.parameters():
        weight.data = weight.data.bfloat16().float()
    folder = prepare(str(published), tmp_path / "cache")
    assert prepared_models(tmp_path / "cache") == [str(published)]
    known = status(tmp_path / "cache", str(published))
    assert (known.state, known.inspected) == ("prepared", inspect(folder))
    chosen = known.backends("auto", "auto")
    assert (chosen.engine, chosen.trainer) == (("native",) if family == "llama" else ("transformers",)) * 2
    model = TransformersModel.load(folder, torch.float32)
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad(), model.adapted(None, 0, lambda layer, q, k, v, window, attend: attend(q, k, v, causal())):
        given = model.compute_logits(model.hidden(tokens)[0])
        torch.testing.assert_close(given, judge(tokens).logits[0], atol=1e-5, rtol=1e-5)


def causal() -> torch.Tensor:
    return torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


def test_a_checkpoint_without_all_weights_is_refused(tmp_path: Path) -> None:
    published = save_small_model(tmp_path / "cut", 0, config("qwen3_moe"))
    weights = load_file(published / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"weights of .* lack model\.layers\.1\.self_attn\.q_proj\.weight"):
        TransformersModel.load(prepare(str(published), tmp_path / "cache"))


def test_models_that_the_native_decoder_refuses_use_transformers(tmp_path: Path) -> None:
    published = save_small_model(tmp_path / "odd")
    about = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(about | {"hidden_act": "gelu"}))
    reason = inspect(prepare(str(published), tmp_path / "cache")).not_native
    assert reason == "the native decoder does not compute it: hidden_act 'gelu' is not supported; supported: silu"


def test_settings_override_the_choice() -> None:
    known, other = Inspected("llama"), Inspected("mixtral", "the native decoder does not know the family mixtral")
    mixed = choose_backends(known, trainer="transformers")
    assert (mixed.engine, mixed.trainer) == ("native", "transformers")
    assert mixed.why == "the native decoder knows the family llama; ROOKERY_TRAINER is transformers"
    assert choose_backends(other).engine == "transformers"
    with pytest.raises(UserError, match=r"ROOKERY_INFERENCE_ENGINE is native, but .* family mixtral; set it to auto"):
        choose_backends(other, engine="native")
