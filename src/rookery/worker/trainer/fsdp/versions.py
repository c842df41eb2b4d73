"""The files of a full-parameter version.

* ``config.json``, the tokenizer's files and ``model.safetensors`` (or ``model-0000i-of-0000n.safetensors`` with their
  index): a folder of transformers, in the compute dtype. An engine needs these.
* ``trainer_state.*``: float32 weights and moments, written by ``torch.distributed.checkpoint``, a file per process. A
  group of any number of processes loads it, and its next step is that of the group that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rookery.errors import UserError
from rookery.folders import temporary_folder
from rookery.tokenization.registry import PUBLISHED_WEIGHTS, WEIGHTS
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.published import INDEX, published_files, unfuse
from rookery.worker.transfer.cache import TRAINER_STATE

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp

SHARD_BYTES = 2 << 30
"""Largest file of weights: a transfer that fails is repeated by file."""


def base_weights(model: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Weights of a prepared base model under their published names, mapped."""
    with safe_open(model / WEIGHTS, framework="pt") as file:
        return unfuse(config, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 (no mapping)


def write_base(folder: Path, model: Path, config: DecoderConfig) -> None:
    """Version 0: the weights of the prepared base model."""
    weights = base_weights(model, config)
    _write_weights(
        folder, model, {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}, weights.__getitem__
    )


def has_state(folder: Path) -> bool:
    """Whether a trainer wrote the version; version 0 has no state."""
    return (folder / f"{TRAINER_STATE}.metadata").exists()


def write(
    folder: Path,
    model: Path,
    dtype: torch.dtype,
    tensors: Mapping[str, Mapping[str, Tensor]],
    step: int,
    gather: Callable[[Tensor], Tensor],
) -> None:
    """Write a version of sharded ``tensors`` ("weights" and moments, by name), its weights in ``dtype``; ``gather``
    makes one whole, and needs all processes. Every process calls this with the same ``folder``; the files are complete
    when the call has returned in all."""
    import torch.distributed.checkpoint as dcp  # half a second, which a worker without a group saves

    written = folder / "state"
    try:
        dcp.save(
            {**tensors, "step": torch.tensor(step)}, storage_writer=dcp.FileSystemWriter(written, sync_files=False)
        )
    except dcp.CheckpointException as error:  # in every process
        raise OSError(f"the optimizer's state was not written: {_cause(error)}") from error
    sizes = {name: (weight.shape, dtype) for name, weight in tensors["weights"].items()}
    left = dict(tensors["weights"])
    try:
        if dist.get_rank() == 0:
            for path in written.iterdir():
                path.rename(folder / f"{TRAINER_STATE}.{path.name.removeprefix('.')}")
            written.rmdir()
            _write_weights(folder, model, sizes, lambda name: gather(left.pop(name)).to(dtype))
    finally:
        for weight in left.values():  # the processes gather the same ones, whatever the first one could write
            gather(weight)


def load_state(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Fill this process's shards of ``tensors`` from a version; the steps taken. Every process calls it."""
    import torch.distributed.checkpoint as dcp

    with temporary_folder() as linked:
        for path in folder.glob(f"{TRAINER_STATE}.*"):
            name = path.name.removeprefix(f"{TRAINER_STATE}.")
            (Path(linked) / (f".{name}" if name == "metadata" else name)).symlink_to(path.absolute())
        step = torch.tensor(0)
        try:
            dcp.load({**tensors, "step": step}, storage_reader=dcp.FileSystemReader(linked))
        except dcp.CheckpointException as error:  # in every process
            cause = _cause(error)
            kind = OSError if isinstance(cause, OSError) else UserError
            raise kind(f"the optimizer's state was not read: {cause}") from error
    return int(step)


def _cause(error: dcp.CheckpointException) -> BaseException:
    """The first process's failure."""
    return next((failure for failure, _ in error.failures.values()), error)


def _write_weights(
    folder: Path, model: Path, sizes: Mapping[str, tuple[torch.Size, torch.dtype]], weight: Callable[[str], Tensor]
) -> None:
    """Files of at most ``SHARD_BYTES`` (or one tensor) with each ``weight(name)`` in the order of ``sizes``."""
    files: list[list[str]] = [[]]
    room = SHARD_BYTES
    for name, (shape, dtype) in sizes.items():
        size = shape.numel() * dtype.itemsize
        if size > room and files[-1]:
            files.append([])
            room = SHARD_BYTES
        files[-1].append(name)
        room -= size
    published_files(model, folder)
    names = [PUBLISHED_WEIGHTS]
    if len(files) > 1:
        names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
        index = {weight_name: name for name, listed in zip(names, files, strict=True) for weight_name in listed}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8")
    for file, listed in zip(names, files, strict=True):
        save_file({name: weight(name).contiguous() for name in listed}, folder / file, metadata={"format": "pt"})
