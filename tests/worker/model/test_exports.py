"""An adapter merged into its base model is what PEFT merges; as GGUF it is what llama.cpp adds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from peft import PeftModel
from tests.support.disks import small_files
from tests.support.families import small_config
from tests.support.small_model import save_small_model

from rookery.errors import StorageFull, UserError
from rookery.tokenization import registry
from rookery.worker.model.adapter import Adapter, init_adapter, read_adapter, write_adapter
from rookery.worker.model.convert import prepare
from rookery.worker.model.exports import merge, write_gguf
from rookery.worker.model.published import export

FAMILIES = ["llama", "qwen3", "gemma3_text"]


def adapted(tmp_path: Path, family: str) -> tuple[Path, Adapter]:
    """A prepared model, and a trained adapter of it, also as a PEFT folder ``adapter``."""
    save_small_model(tmp_path / "base", 0, small_config(family))
    folder = prepare(str(tmp_path / "base"), tmp_path / "cache")
    projections = registry.projections(tmp_path / "cache", str(tmp_path / "base"))
    assert projections is not None
    adapter = init_adapter(projections, 4, 8.0, ["q", "k", "v", "o", "gate", "up", "down"], seed=1)
    generator = torch.Generator().manual_seed(2)
    for _, b in adapter.weights.values():
        b.normal_(std=0.3, generator=generator)
    (tmp_path / "adapter").mkdir()
    write_adapter(tmp_path / "adapter", adapter)
    return folder, read_adapter(tmp_path / "adapter", projections)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_model_equals_the_one_that_peft_merges(family: str, tmp_path: Path) -> None:
    folder, adapter = adapted(tmp_path, family)
    merge(folder, adapter, tmp_path / "deep" / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    wanted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "merged", dtype=torch.bfloat16)
    assert found.state_dict().keys() == wanted.keys()
    changed = 0
    for name, weight in found.state_dict().items():
        torch.testing.assert_close(weight, wanted[name], rtol=2**-7, atol=2**-10)  # bfloat16 has 8 bits
        changed += not torch.equal(weight, before[name])
    assert changed == len(adapter.weights)
    assert (tmp_path / "deep" / "merged" / "tokenizer.json").is_file()
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["merged"]
    with pytest.raises(UserError, match=r"--merge: .*merged exists; give a new folder"):
        merge(folder, adapter, tmp_path / "deep" / "merged")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf_adapter_changes_the_weights_as_llama_cpp_stores_them(family: str, tmp_path: Path) -> None:
    folder, adapter = adapted(tmp_path, family)
    write_gguf(folder, adapter, tmp_path / "adapter.gguf")
    reader = gguf.GGUFReader(tmp_path / "adapter.gguf")
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["general.architecture"] == family and values["general.type"] == "adapter"
    assert values["adapter.type"] == "lora" and values["adapter.lora.alpha"] == 8.0
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert len(tensors) == 2 * len(adapter.weights)
    config = small_config(family)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.upper()), config.num_hidden_layers)
    for (layer, part), (a, b) in adapter.weights.items():
        module = f"self_attn.{part}_proj" if part in "qkvo" else f"mlp.{part}_proj"
        name = f"{names.get_name(f'model.layers.{layer}.{module}')}.weight"
        change = tensors[f"{name}.lora_b"] @ tensors[f"{name}.lora_a"]
        if family == "llama" and part in "qk":  # transformers undoes llama.cpp's order when it reads a GGUF
            heads = config.num_attention_heads if part == "q" else config.num_key_value_heads
            change = change.reshape(heads, -1, 2, change.shape[1]).swapaxes(1, 2).reshape(change.shape)
        np.testing.assert_allclose(change, (b @ a).numpy(), rtol=1e-4, atol=1e-5)


def test_a_full_disk_is_named_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    folder, adapter = adapted(tmp_path, "llama")
    made = tmp_path / "made"
    writers: list[tuple[Callable[[], object], str]] = [
        (
            lambda: merge(folder, adapter, made / "merged"),
            f"--merge: {made}/merged cannot be written: its disk is full",
        ),
        (
            lambda: write_gguf(folder, adapter, made / "gguf"),
            f"--gguf: {made}/gguf cannot be written: its disk is full",
        ),
        (lambda: export(folder, made / "model"), f"--export: {made}/model cannot be written: its disk is full"),
        (lambda: prepare(str(tmp_path / "base"), made), f"the disk of {made}/.* is full; .* ROOKERY_CACHE"),
    ]
    for write, reason in writers:
        with small_files(16 << 10), pytest.raises(StorageFull, match=reason):
            write()
    assert [path.name for path in made.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
    for write, _ in writers:
        write()


def test_gguf_of_a_family_without_a_known_format_is_refused(tmp_path: Path) -> None:
    folder, adapter = adapted(tmp_path, "gemma3_text")
    with pytest.raises(UserError, match=r"--gguf: no format is known for gemma3_text models, allowed: llama, "):
        write_gguf(folder, adapter, tmp_path / "adapter.gguf")
    assert not (tmp_path / "adapter.gguf").exists()
