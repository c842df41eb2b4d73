"""PEFT folders of LoRA adapters, judged without torch: by the service when one is uploaded, by a worker when it reads
one.

Promises:

* Accepted is exactly what PEFT computes as ``scale · B A x`` on the unchanged base model, with one rank and one scale:
  alpha / rank (LoRA, arXiv:2106.09685), or alpha / √rank with ``use_rslora`` (arXiv:2312.03732). Every option of
  ``adapter_config.json`` is judged by its name and value (``OPTIONS``); any other option, also one that a later PEFT
  adds, is refused by its name.
* Each weight is one that PEFT would load: a complete pair of A and B of that rank, of a module that ``target_modules``
  names.
* No weight is NaN or infinite in float32.
* Errors name no file of this machine.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import numpy as np
import regex

from rookery.bounds import FLOAT32
from rookery.errors import UserError, count_of, short

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

PARTS = ("q", "k", "v", "o", "gate", "up", "down")
MODULES = {part: ("self_attn" if part in "qkvo" else "mlp") + f".{part}_proj" for part in PARTS}
"""Name of each part's module within a layer, in the families that the native decoder knows."""
_PARTS = {module: part for part, module in MODULES.items()}

CONFIG_BYTES = 1 << 20
"""Largest ``adapter_config.json``. PEFT writes two or three kilobytes."""

HEADER_BYTES = 2 << 20
"""Largest header of the weights file. A weight has some 170 bytes there, and a model of 100 layers 1,400 weights."""

_SCANNED = 1 << 20
"""Bytes of weights that are scanned at once."""

_NAME_CHARACTERS = 500
"""Longest name of a weight."""

_PATTERN_CHARACTERS = 1000
_PATTERN_SECONDS = 1.0
"""Longest pattern in ``target_modules`` and ``exclude_modules``, and the time to match them with all modules: a pattern
can take time that is exponential in its length. Those of published adapters match within microseconds."""

_KEY = re.compile(r"base_model\.model\.(.+?)\.(0|[1-9][0-9]{0,4})\.(.+)\.lora_([AB])\.weight")

_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of weights that become float32 without a scale of their own, and their bytes."""

_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Bits of the exponent, all of which are set in a NaN or an infinity."""


class ProjectionShapes(Protocol):
    """The projections of a base model that adapters may change. A part is one of ``PARTS``, or of another family's
    layers the module's name within the layer (``mlp.shared_expert.up_proj``)."""

    @property
    def shapes(self) -> Mapping[tuple[int, str], tuple[int, int]]:
        """(in, out) features of each (layer, part), in order of layers."""
        ...

    @property
    def prefix(self) -> str:
        """Name of the list of layers, as PEFT writes it."""
        ...


class Projections(ProjectionShapes, Protocol):
    """The projections of a loaded model that adapters may change."""

    @property
    def sites(self) -> Mapping[str, tuple[str, ...]]:
        """Projections that are computed as one, and their parts in order of the output rows."""
        ...


def part_of(module: str) -> str:
    """The part of a module by its name within the layer."""
    return _PARTS.get(module, module)


def target_of(part: str) -> str:
    """How a job's ``targets`` call a part: ``gate`` is each module named ``gate_proj``, wherever it is in a layer."""
    return part.rpartition(".")[2].removesuffix("_proj")


# --- the options ----------------------------------------------------------------------------------------------------

_MERGE = "merge it into the base model (model.merge_and_unload(), save_pretrained) and give that folder as base_model"
_INITIAL = (
    "PEFT changes the base model's weights with it; convert it with model.save_pretrained(folder,"
    " path_initial_model_for_weight_conversion=the folder saved before training)"
)
_EXTRACT = "convert it with peft.save_as_lora(folder, model, rank=...)"
_TRAIN = "train it as a LoRA without that option"


@dataclass(frozen=True)
class Option:
    """One option of PEFT's ``LoraConfig``."""

    allows: Callable[[Any], bool]
    """Whether a value is known to leave the meaning ``scale · B A x``."""
    instead: str = "send an adapter without it"
    """The advice for any other value."""


def _anything(_: Any) -> bool:
    return True


def _text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _off(value: Any) -> bool:
    """As PEFT reads it: what is empty is off."""
    return value is None or value is False or (isinstance(value, list | dict) and not value)


def _number(value: Any) -> bool:
    """Finite in float32, as a job's own ``alpha`` may be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < FLOAT32


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20


def _names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _layers(value: Any) -> bool:
    listed = value if isinstance(value, list) else [0 if value is None else value]
    return all(isinstance(layer, int) and not isinstance(layer, bool) for layer in listed)


def _layer_lists(value: Any) -> bool:
    """PEFT takes these as patterns; known is the meaning of plain names."""
    listed = value if isinstance(value, list) else [value or "layers"]
    return all(isinstance(name, str) and re.fullmatch(r"\w+", name) for name in listed)


def _initial(value: Any) -> bool:
    return value is None or isinstance(value, bool) or value in ("gaussian", "eva", "orthogonal", "mica")


def _runtime(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and set(value) <= {"ephemeral_gpu_offload"})


OPTIONS: dict[str, Option] = {
    # Who made it, and with what: no meaning for the function.
    "peft_type": Option(lambda value: value == "LORA", "only LoRA adapters are supported; " + _EXTRACT),
    "task_type": Option(_text),
    "auto_mapping": Option(_anything),
    "peft_version": Option(_text),
    "base_model_name_or_path": Option(_text),
    "revision": Option(_text),
    "inference_mode": Option(_flag),
    # Rank, scale, and the modules: read below.
    "r": Option(_whole, "give a whole number above 0"),
    "lora_alpha": Option(_number, "give a number"),
    "use_rslora": Option(_flag),
    "target_modules": Option(_names, "give the names of the modules"),
    "exclude_modules": Option(lambda value: value is None or _names(value), "give the names of modules"),
    "layers_to_transform": Option(_layers, "give the numbers of layers"),
    "layers_pattern": Option(_layer_lists, "leave it out, or give the name of the list of layers"),
    # In effect while PEFT trains only, or only with another option that is refused.
    "lora_dropout": Option(lambda value: _number(value) and 0 <= value <= 1, "give a number from 0 to 1"),
    "fan_in_fan_out": Option(_flag),  # PEFT turns it off for the linear modules that are supported
    "ensure_weight_tying": Option(_flag),  # of embeddings, whose adapters are refused
    "runtime_config": Option(_runtime),
    "megatron_core": Option(_text),
    "loftq_config": Option(_anything),
    "eva_config": Option(_anything),
    "corda_config": Option(_anything),
    "lora_ga_config": Option(_anything),
    "qalora_group_size": Option(_anything),
    "merge_weights": Option(_flag),  # of PEFT before 0.3
    # Another function than scale · B A x on the unchanged base model.
    "init_lora_weights": Option(_initial, "it may change the base model's weights; " + _MERGE),
    "rank_pattern": Option(_off, "only one rank for all modules is supported; " + _EXTRACT),
    "alpha_pattern": Option(_off, "only one alpha for all modules is supported; " + _EXTRACT),
    "use_dora": Option(_off, _EXTRACT),
    "bias": Option(lambda value: value in (None, "none"), _MERGE),
    "lora_bias": Option(_off, _MERGE),
    "modules_to_save": Option(_off, _MERGE),
    "trainable_token_indices": Option(_off, _MERGE),
    "target_parameters": Option(_off, _MERGE),
    "layer_replication": Option(_off, _MERGE),
    "alora_invocation_tokens": Option(lambda value: value is None, _TRAIN),
    "use_qalora": Option(_off, _TRAIN),
    "use_bdlora": Option(_off, _EXTRACT),
    "arrow_config": Option(_off, _TRAIN),
    "kasa_config": Option(_off, _MERGE),
    "velora_config": Option(_off, _EXTRACT),
    "monteclora_config": Option(_off, _TRAIN),
    "megatron_config": Option(_off, _TRAIN),
    "enable_lora": Option(_off, _TRAIN),  # of PEFT before 0.3
}
"""Every option that PEFT writes into ``adapter_config.json``."""

_REQUIRED = ("peft_type", "r", "lora_alpha", "target_modules")

_CONVERTED = ("pissa", "olora", "corda", "lora_ga")
"""Begins of the initialisations that PEFT converts; of others, such as ``loftq``, the base model stays changed."""

_RANDOM = (None, False, "orthogonal")
"""Initialisations with which a targeted module without weights is not zero in PEFT."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file; ``begin`` and ``end`` count from the end of its header, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class PeftLora:
    """A LoRA in a PEFT folder: ``shapes[layer, part]`` = (in, out) features."""

    rank: int
    alpha: float
    rslora: bool
    prefix: str
    """Name of the list of layers."""
    shapes: dict[tuple[int, str], tuple[int, int]]
    base_model: str
    """The base model's name that the folder gives, or empty."""
    options: Mapping[str, Any] = field(repr=False)

    @property
    def targets(self) -> list[str]:
        """The adapted parts as a job's ``targets`` call them, in the order of ``PARTS``."""
        found = {target_of(part) for _, part in self.shapes}
        return [part for part in PARTS if part in found]

    def misfit(self, model: ProjectionShapes) -> str:
        """Why this is no adapter of ``model``; empty if it is one."""
        parts = {part for _, part in model.shapes}
        for (layer, part), shape in self.shapes.items():
            if self.prefix != model.prefix or part not in parts:
                name = f"{self.prefix}.{layer}.{MODULES.get(part, part)}"
                return f"its weights are for {short(name)}, which is no projection of this base model"
            expected = model.shapes.get((layer, part))
            if shape != expected:
                has = (
                    "does not have"
                    if expected is None
                    else f"has as {expected[0]} to {count_of(expected[1], 'feature')}"
                )
                return (
                    f"the LoRA of layer {layer} {part} does not fit this base model: it is for {shape[0]} to"
                    f" {count_of(shape[1], 'feature')}, which the model {has}"
                )
        if self.options.get("init_lora_weights", True) in _RANDOM:
            targeted = _Targets(self.options)
            for layer, part in model.shapes:
                if (layer, part) not in self.shapes and targeted(f"{model.prefix}.{layer}.{MODULES.get(part, part)}"):
                    return f"layer {layer} {part} is in target_modules and has no weights; PEFT would make random ones"
        return ""


def read_lora(config: bytes, weights: BinaryIO, size: int) -> PeftLora:
    """The LoRA of a PEFT folder with this ``adapter_config.json``, from the header of its weights file, which has
    ``size`` bytes; ``weights`` is at its begin. Raises ``UserError`` for anything else."""
    options = read_config(config)
    tensors = read_header(weights, size)
    rank, targeted = options["r"], _Targets(options)
    pairs: dict[tuple[str, int, str], dict[str, tuple[int, ...]]] = {}
    for name, entry in tensors.items():
        match = _KEY.fullmatch(name) if len(name) <= _NAME_CHARACTERS else None
        if match is None or match[3] in PARTS:  # a module of that name would be taken for the part
            raise UserError(f"adapter: weight {short(name)!r} is no LoRA of a projection in a layer; {_MERGE}")
        if entry.dtype not in _DTYPES:
            raise UserError(f"adapter: weight {short(name)!r} is of type {entry.dtype}; save it as float32 or bfloat16")
        pairs.setdefault((match[1], int(match[2]), match[3]), {})[match[4]] = entry.shape
    prefixes = {prefix for prefix, _, _ in pairs}
    if len(prefixes) != 1:
        problem = (
            "holds no weights" if not prefixes else f"has layers in {count_of(len(prefixes), 'list')}, a model has one"
        )
        raise UserError(f"adapter: {WEIGHTS_FILE} {problem}; send a folder that PEFT saved")
    shapes = {}
    for (prefix, layer, module), pair in pairs.items():
        name = f"{prefix}.{layer}.{module}"
        if len(pair) < 2:
            raise UserError(f"adapter: {short(name)} has no lora_{'AB'['A' in pair]}; send a folder that PEFT saved")
        (a, b) = (pair["A"], pair["B"])
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (rank, rank) or 0 in (a[1], b[0]):
            raise UserError(
                f"adapter: the LoRA of {short(name)} has A {list(a)} and B {list(b)}, which do not fit rank r = {rank}"
            )
        if not targeted(name):
            raise UserError(
                f"adapter: {short(name)} has weights, but {CONFIG_FILE} does not target it, so PEFT would ignore them;"
                " correct target_modules"
            )
        shapes[layer, part_of(module)] = (a[1], b[0])
    return PeftLora(
        rank=rank,
        alpha=options["lora_alpha"],
        rslora=bool(options.get("use_rslora")),
        prefix=prefixes.pop(),
        shapes=shapes,
        base_model=options.get("base_model_name_or_path") or "",
        options=options,
    )


def read_config(content: bytes) -> dict[str, Any]:
    """The options in an ``adapter_config.json``. Raises ``UserError`` for one that is not known to mean a LoRA."""
    if len(content) > CONFIG_BYTES:
        raise UserError(f"adapter: {CONFIG_FILE} is larger than {CONFIG_BYTES} bytes; send a folder that PEFT saved")
    try:
        options = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"adapter: {CONFIG_FILE} is not JSON; send a folder that PEFT saved") from None
    if not isinstance(options, dict):
        raise UserError(f"adapter: {CONFIG_FILE} is not a JSON object; send a folder that PEFT saved")
    if missing := [name for name in _REQUIRED if name not in options]:
        raise UserError(f"adapter: {CONFIG_FILE} has no {missing[0]}; send a folder that PEFT saved")
    for name, value in options.items():
        option, given = OPTIONS.get(name), short(json.dumps(value))
        if option is None:
            version = options.get("peft_version")
            since = f" (of PEFT {short(version)})" if isinstance(version, str) else ""
            raise UserError(
                f"adapter: the option {short(name)!r}{since} is not known here, so it may change what the adapter"
                f" computes; where it has PEFT's default, delete it from {CONFIG_FILE}"
            )
        if not option.allows(value):
            instead = option.instead
            if name == "init_lora_weights" and str(value).lower().startswith(_CONVERTED):
                instead = _INITIAL
            raise UserError(f"adapter: the option {name} = {given} is not supported: {instead}")
    return options


class _Targets:
    """Whether PEFT adapts a module, by its name. Follows ``check_target_module_exists`` of PEFT."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Raises ``UserError`` for a pattern that is not one."""
        self._wanted = _module_names("target_modules", options["target_modules"])
        self._not_wanted = _module_names("exclude_modules", options.get("exclude_modules") or [])
        layers, lists = options.get("layers_to_transform"), options.get("layers_pattern")
        self._layers = {layers} if isinstance(layers, int) else set(layers or ())
        names = "|".join([lists] if isinstance(lists, str) else lists or ())
        self._numbered = re.compile(rf"(?:^|.*?\.)(?:{names or '[^.]*'})\.(\d+)\.")
        self._seconds = _PATTERN_SECONDS

    def __call__(self, module: str) -> bool:
        """Raises ``UserError`` for a pattern that takes too long."""
        if self._named(self._not_wanted, module) or not self._named(self._wanted, module):
            return False
        if isinstance(self._wanted, str) or module in self._wanted or not self._layers:
            return True
        found = self._numbered.match(module)
        return found is not None and int(found[1]) in self._layers

    def _named(self, names: str | set[str], module: str) -> bool:
        if not isinstance(names, str):
            parts = module.split(".")
            return any(".".join(parts[first:]) in names for first in range(len(parts)))
        began = time.perf_counter()
        try:
            found = regex.fullmatch(names, module, timeout=max(self._seconds, 1e-6), concurrent=True)
        except TimeoutError:
            raise UserError(
                f"adapter: the pattern {short(json.dumps(names))} takes too long; give the modules' names"
            ) from None
        self._seconds -= time.perf_counter() - began
        return found is not None


def _module_names(option: str, value: str | list[str]) -> str | set[str]:
    """The names, or the pattern."""
    if not isinstance(value, str):
        return set(value)
    if value == "all-linear":
        return ".*"
    _check_pattern(option, value)
    return value


def _check_pattern(name: str, pattern: str) -> None:
    """Counted repetitions are refused: a short pattern can have so many that compiling it takes all memory."""
    try:
        if len(pattern) > _PATTERN_CHARACTERS or "{" in pattern:
            raise ValueError
        re.compile(pattern)
        regex.compile(pattern)
    except (ValueError, re.error, regex.error, RecursionError, OverflowError):
        raise UserError(
            f"adapter: the option {name} = {short(json.dumps(pattern))} is not a pattern that is supported; give the"
            " modules' names"
        ) from None


# --- the weights ----------------------------------------------------------------------------------------------------


def read_header(file: BinaryIO, size: int) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file of ``size`` bytes by name; afterwards ``file`` is at the end of its header.
    Raises ``UserError`` for any other file, a cut one, and one with gaps."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(HEADER_BYTES, size - 8):
            raise ValueError("its header is too long")
        raw = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        about = raw.pop("__metadata__", {})
        if not isinstance(about, dict) or not all(isinstance(value, str) for value in about.values()):
            raise ValueError("its metadata are not texts")
        entries = {name: _entry(name, entry) for name, entry in raw.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            known = math.prod(entry.shape) * _DTYPES.get(entry.dtype, 0)
            if entry.begin != end or entry.end < end or (known and entry.end - end != known):
                raise ValueError(f"the bytes of {short(name)} are not those of its shape")
            end = entry.end
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes, its header says {8 + length + end}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"adapter: {WEIGHTS_FILE} is no safetensors file: {short(str(error))}") from None
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _entry(name: str, raw: dict[str, Any]) -> TensorEntry:
    shape, (begin, end) = raw["shape"], raw["data_offsets"]
    whole = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 53 for n in (*shape, begin, end))
    if not whole or not isinstance(raw["dtype"], str) or len(raw) != 3:
        raise ValueError(f"the entry of {short(name)} is not one")
    return TensorEntry(raw["dtype"], tuple(shape), begin, end)


def check_finite(file: BinaryIO, size: int) -> None:
    """Raises ``UserError`` that names the first weight of a safetensors file with a number that is NaN or infinite in
    float32. The file has ``size`` bytes, and ``file`` is at its begin; a piece of it is in memory at a time."""
    for name, entry in sorted(read_header(file, size).items(), key=lambda item: item[1].begin):
        left = entry.end - entry.begin
        while left > 0:
            piece = file.read(min(left, _SCANNED))
            if not piece:
                raise UserError(f"adapter: {WEIGHTS_FILE} ends within {short(name)}")
            if not _finite(entry.dtype, piece):
                raise UserError(
                    f"adapter: weight {short(name)!r} has a number that is NaN or infinite; send an earlier checkpoint"
                )
            left -= len(piece)


def _finite(dtype: str, piece: bytes) -> bool:
    if dtype == "F64":
        return bool((np.abs(np.frombuffer(piece, "<f8")) <= np.finfo(np.float32).max).all())
    kind, exponent = _EXPONENTS[dtype]
    return not ((np.frombuffer(piece, kind) & exponent) == exponent).any()
