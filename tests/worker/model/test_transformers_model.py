"""Preparing and loading models that transformers computes, and the choice of engine and trainer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.families import SIZES, small_config
from tests.support.small_model import save_small_model

from rookery.errors import UserError
from rookery.tokenization.registry import (
    FORMAT,
    PREPARED,
    WEIGHTS,
    Inspected,
    choose_backends,
    inspect,
    prepared_models,
    status,
)
from rookery.worker.model.convert import prepare, round_weights
from rookery.worker.model.published import export
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


def save_with_bias(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model whose router has a bias larger than its differences by far, which bfloat16 would make equal."""
    save_small_model(folder, 0, config("deepseek_v3"))
    weights = {name: x.to(dtype) for name, x in load_file(folder / "model.safetensors").items()}
    for name in [name for name in weights if name.endswith(BIAS)]:
        weights[name] = 34.5 + torch.arange(6) / 1000
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


BIAS = "e_score_correction_bias"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_a_family_keeps_in_float32_are_not_rounded(tmp_path: Path, dtype: torch.dtype) -> None:
    source = save_with_bias(tmp_path / "model", dtype)
    folder = prepare(str(source), tmp_path / "cache")
    export(folder, tmp_path / "exported")
    judge = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    for model in (exported, TransformersModel.load(folder, torch.bfloat16).model):
        for name, weight in model.state_dict().items():
            assert weight.dtype == judge[name].dtype and torch.equal(weight, judge[name]), name
    types = {weight.dtype for name, weight in judge.items() if name.endswith(BIAS)}
    assert types == {torch.float32}


def test_types_of_stored_weights() -> None:
    """With a publisher's choice of mixed types, with a family's, and with neither."""
    names = {"bias": torch.float32, "large": torch.float32, "half": torch.float16, "ids": torch.int64}
    sizes = {"bias": 2, "large": 90, "half": 8, "ids": 50}
    weights = {name: torch.ones(sizes[name], dtype=dtype) for name, dtype in names.items()}

    def kept(exact: str | None, **more: torch.Tensor) -> set[str]:
        pattern = re.compile(exact) if exact is not None else None
        found = round_weights(weights | more, pattern)
        assert found["ids"].dtype == torch.int64 and found["half"].dtype == torch.bfloat16
        return {name for name, weight in found.items() if weight.dtype == torch.float32}

    half = torch.ones(900, dtype=torch.bfloat16)
    assert kept("bias") == {"bias"} and kept("(?!)") == set()
    assert kept("(?!)", most=half) == {"bias", "large"}
    assert kept(None, most=half) == set()  # the native decoder computes in one type


def test_models_that_an_earlier_format_rounded_are_prepared_again(tmp_path: Path) -> None:
    """Others only get the present number."""
    for family in ("deepseek_v3", "qwen3_moe", "llama"):
        if family == "deepseek_v3":
            source = save_with_bias(tmp_path / family)
        else:
            source = save_small_model(tmp_path / family, 0, config(family))
        folder = prepare(str(source), tmp_path / "cache")
        mark, weights = json.loads((folder / PREPARED).read_text()), load_file(folder / WEIGHTS)
        del mark[FORMAT]
        (folder / PREPARED).write_text(json.dumps(mark))
        rounded = {name: x.bfloat16() for name, x in weights.items()}
        save_file(rounded, folder / WEIGHTS, metadata={"format": "pt"})
        inode = (folder / WEIGHTS).stat().st_ino
        assert status(tmp_path / "cache", str(source)).state == ("prepared" if family == "llama" else "known")
        assert prepare(str(source), tmp_path / "cache") == folder
        assert ((folder / WEIGHTS).stat().st_ino == inode) == (family != "deepseek_v3")
        found = load_file(folder / WEIGHTS)
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert status(tmp_path / "cache", str(source)).state == "prepared"


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
