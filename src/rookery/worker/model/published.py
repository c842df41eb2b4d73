"""A base model in the layout in which it is published, and its weights fused as the native decoder reads them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rookery.errors import NO_ROOM, UserError
from rookery.folders import no_room
from rookery.tokenization.chat import TOOL_TEMPLATE
from rookery.tokenization.registry import CONFIG, PUBLISHED_CONFIG, PUBLISHED_WEIGHTS, WEIGHTS
from rookery.worker.model.adapter import MODULES
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import output_slices
from rookery.worker.transfer.http import errno_of

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
)
"""Files of a published model that are copied unchanged."""

_IGNORED_WEIGHTS = ("rotary_emb.inv_freq",)
"""Buffers of old checkpoints; the decoder computes them from the config."""

INDEX = "model.safetensors.index.json"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes or the process dies
        yield


def read_published(folder: Path) -> dict[str, Tensor]:
    """Weights of a folder of safetensors by name, mapped. Raises ``UserError`` for one that cannot be read."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    published: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                published.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"base_model: {folder.name}/{name} cannot be read: {reason}") from None
    return published


def _published_names(config: DecoderConfig) -> dict[str, list[str]]:
    """The parts of each fused weight in order of the rows, as a ``…ForCausalLM`` state dict names them."""
    names = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
    if not config.tied:
        names["head"] = ["lm_head.weight"]
    modules = {"attention_norm": ["input_layernorm"], "mlp_norm": ["post_attention_layernorm"]}
    if config.qk_norm:
        modules |= {"q_norm": ["self_attn.q_norm"], "k_norm": ["self_attn.k_norm"]}
    modules |= {site: [MODULES[part] for part in parts] for site, parts in SITES.items()}
    biased = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    for i in range(config.layers):
        for name, parts in modules.items():
            names[f"layers.{i}.{name}"] = [f"model.layers.{i}.{part}.weight" for part in parts]
            if biased.get(name):
                names[f"layers.{i}.{name}_bias"] = [f"model.layers.{i}.{part}.bias" for part in parts]
    return names


def fuse(config: DecoderConfig, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenates the weights of a ``…ForCausalLM`` state dict into the fused ones that ``Decoder`` reads; no number
    changes. Raises ``UserError`` that names a missing or an unexpected weight."""
    left = {name: tensor for name, tensor in published.items() if not name.endswith(_IGNORED_WEIGHTS)}
    if config.tied:
        left.pop("lm_head.weight", None)
    fused = {}
    for name, parts in _published_names(config).items():
        if missing := [part for part in parts if part not in left]:
            raise UserError(f"the model's weights lack {missing[0]}")
        tensors = [left.pop(part) for part in parts]
        fused[name] = (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).contiguous()
    if left:
        raise UserError(f"the model has a weight that its config does not explain: {next(iter(left))}")
    return fused


def unfuse(config: DecoderConfig, fused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`fuse`: the weights under the names of a ``…ForCausalLM`` state dict, as views. A tied head
    is left out."""
    published: dict[str, Tensor] = {}
    for name, parts in _published_names(config).items():
        site = name.rpartition(".")[2].removesuffix("_bias")
        rows = output_slices(config, site).values() if site in SITES else [slice(None)]
        published |= {part: fused[name][some] for part, some in zip(parts, rows, strict=True)}
    return published


def published(folder: Path) -> Path:
    """The model of the prepared ``folder`` as transformers and vLLM read it, written once next to it."""
    target = folder.with_name(folder.name + ".published")
    with locked(folder.with_name(folder.name + ".lock")):
        if not target.is_dir():
            write_published(folder, target, linked=True)
    return target


def export(folder: Path, target: Path) -> None:
    """Writes the model of the prepared ``folder`` to the new folder ``target`` as transformers reads it. Raises
    ``UserError`` and ``StorageFull``."""
    if target.exists():
        raise UserError(f"--export: {target} exists; give a new folder")
    with written(f"--export: {target}"):
        write_published(folder, target, linked=False)


@contextmanager
def written(name: str) -> Iterator[None]:
    """Files of ``name`` are written within: an option with its path, or a folder. Raises
    :class:`~rookery.errors.StorageFull` where their disk is full, and :class:`UserError` where it refuses them."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = errno_of(error)
        if not number:
            raise
        if number in NO_ROOM:
            raise no_room(name) from None
        raise UserError(f"{name} cannot be written: {os.strerror(number)}") from None


def write_published(folder: Path, target: Path, *, linked: bool) -> None:
    """The whole folder or nothing. Weights that are as published already are ``linked``, or else copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed attempt
    part.mkdir()
    try:
        published_files(folder, part)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            fused = "embed" in file.keys()  # noqa: SIM118 (no mapping)
        if fused:
            weights = unfuse(DecoderConfig.read(folder), load_file(folder / WEIGHTS))
            contiguous = {name: weight.contiguous() for name, weight in weights.items()}
            save_file(contiguous, part / PUBLISHED_WEIGHTS, metadata={"format": "pt"})
        elif linked:
            (part / PUBLISHED_WEIGHTS).symlink_to(os.path.relpath(folder / WEIGHTS, part))
        else:
            shutil.copyfile(folder / WEIGHTS, part / PUBLISHED_WEIGHTS)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def published_files(folder: Path, target: Path) -> None:
    """Copies all files of the prepared ``folder`` but the weights, as transformers reads them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    about = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[about["model_type"]]]} | about | {"dtype": "bfloat16"}
    (target / PUBLISHED_CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    copy_files(folder, target)


def copy_files(folder: Path, target: Path) -> None:
    """Copies the files of a model that stay as they are."""
    for name in COPIED:
        if (folder / name).is_file():
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, target / name)
