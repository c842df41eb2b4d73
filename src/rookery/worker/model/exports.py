"""A base model with an adapter merged into it, in the published layout, and an adapter as GGUF for llama.cpp.

``python -m rookery.worker.model.exports NAME --cache CACHE --adapter FOLDER [--merge DIR] [--gguf FILE]``
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file

from rookery.errors import EXIT_REFUSED, RookeryError, UserError, installs, to_stderr
from rookery.tokenization import registry
from rookery.tokenization.registry import CONFIG, PUBLISHED_WEIGHTS
from rookery.worker.model.adapter import MODULES, Adapter, read_adapter
from rookery.worker.model.convert import prepare
from rookery.worker.model.published import read_published, write_published, written

GGUF_FAMILIES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "smollm3": ("smollm3", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
"""By model type the architecture's name in GGUF, and whether its queries and keys are stored in the order of
interleaved rotary embeddings."""

_GGUF_NAMES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip


def merge(folder: Path, adapter: Adapter, target: Path) -> None:
    """Write the model of the prepared ``folder`` with ``W + scale · B A`` for each adapted weight to the new folder
    ``target``, as transformers reads it. The sum is computed in float32 and rounded once to the type of ``W``. Raises
    ``UserError`` and ``StorageFull``; then there is no ``target``."""
    part = target.with_name(f".{target.name}.merging")
    if target.exists():
        raise UserError(f"--merge: {target} exists; give a new folder")
    try:
        with written(f"--merge: {target}"):
            write_published(folder, part, linked=False)
            weights = {name: weight.clone() for name, weight in read_published(part).items()}
            for (layer, module), (a, b) in adapter.weights.items():
                name = f"{adapter.prefix}.{layer}.{MODULES.get(module, module)}.weight"
                if name not in weights:
                    raise UserError(f"--merge: the base model has no separate weight {name}; use the adapter as it is")
                old = weights[name]
                weights[name] = torch.addmm(old.float(), b, a, alpha=adapter.scale).to(old.dtype)
            save_file(weights, part / PUBLISHED_WEIGHTS, metadata={"format": "pt"})
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_gguf(folder: Path, adapter: Adapter, file: Path) -> None:
    """Write ``adapter`` as a LoRA of llama.cpp for the model of the prepared ``folder``. Raises ``UserError`` and
    ``StorageFull``; then there is no ``file``."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"--gguf needs the package gguf: {installs('gguf')}") from None
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    family = GGUF_FAMILIES.get(config["model_type"])
    if family is None:
        known = ", ".join(GGUF_FAMILIES)
        raise UserError(f"--gguf: no format is known for {config['model_type']} models, allowed: {known}")
    if unknown := sorted({part for _, part in adapter.weights} - _GGUF_NAMES.keys()):
        raise UserError(f"--gguf: no name is known for the module {unknown[0]}")
    if file.exists():
        raise UserError(f"--gguf: {file} exists; give a new file")
    name, interleaved = family
    heads = {"q": config["num_attention_heads"], "k": config.get("num_key_value_heads", config["num_attention_heads"])}
    unfinished = file.with_name(f".{file.name}.part")
    with written(f"--gguf: {file}"), ExitStack() as opened:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened.callback(unfinished.unlink, missing_ok=True)
        writer = gguf.GGUFWriter(unfinished, name)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.scale * adapter.rank)  # it divides by the rank
        for (layer, part), (a, b) in adapter.weights.items():
            rows = _interleaved(b, heads[part]) if interleaved and part in heads else b
            at = f"blk.{layer}.{_GGUF_NAMES[part]}.weight"
            writer.add_tensor(f"{at}.lora_a", a.contiguous().numpy())
            writer.add_tensor(f"{at}.lora_b", rows.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        try:
            gguf.GGUFReader(unfinished)
        except ValueError:  # it is cut: NumPy, which writes the tensors, reports no error at the end of a file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
        unfinished.rename(file)


def _interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head with its two halves interleaved, as llama.cpp rotates them."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rookery.worker.model.exports")
    parser.add_argument("name", help="the base model: a catalogue name, a local folder or a hub id")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True, help="PEFT folder")
    parser.add_argument("--merge", type=Path, help="new folder for the merged model")
    parser.add_argument("--gguf", type=Path, help="new file for the adapter as GGUF")
    given = parser.parse_args()
    try:
        cache = given.cache.expanduser()
        folder = prepare(given.name, cache)
        projections = registry.projections(cache, given.name)
        assert projections is not None, "it is prepared"
        adapter = read_adapter(given.adapter, projections)
        if given.merge is not None:
            merge(folder, adapter, given.merge)
        if given.gguf is not None:
            write_gguf(folder, adapter, given.gguf)
    except RookeryError as error:
        to_stderr(error)
        sys.exit(EXIT_REFUSED if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
