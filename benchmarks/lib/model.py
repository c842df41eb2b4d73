"""The base model and adapters as transformers, PEFT, vLLM and TRL read them: the same numbers under published names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lib.contender import Contender, ContenderFailed
from benchmarks.lib.harness import HERE, MODEL, WORK, Result, peer_python, whole
from benchmarks.lib.orders import trained_adapter

from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker.model import convert
from rookery.worker.model import published as published_layout
from rookery.worker.model.adapter import write_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import best_dtype

OURS = ("GOMP_SPINCOUNT", "MKL_CBWR")
"""The variables that a worker's package sets for its threads and sums: a peer keeps its libraries'
values. Large pages and the allocator are for everybody."""


def number_type() -> str:
    """The type of every contender: the quicker of bfloat16 and float32 on this machine, as a worker chooses."""
    return str(best_dtype()).removeprefix("torch.")


def ours() -> Path:
    """The prepared folder."""
    return convert.prepare(MODEL, Settings.load().cache)


def published() -> Path:
    """The weights of :func:`ours` under the names of a ``LlamaForCausalLM`` checkpoint."""
    return published_layout.published(ours())


def start_peer(name: str, home: str, script: str, *more: str, environment: dict[str, str] | None = None) -> Contender:
    """``peers/script`` with the model, the type of numbers and ``more``, in the environment ``home``, loaded. Raises
    :class:`ContenderFailed`."""
    python = peer_python(home)
    if python is None:
        raise ContenderFailed("its environment is missing: make bench-peers")
    without = [part for name in OURS for part in ("-u", name)]
    command = ["env", *without, str(python), str(HERE / "peers" / script), str(published()), number_type(), *more]
    return Contender(name, command, environment)


def attempt(result: Result, peers: dict[str, Contender], name: str, **task: Any) -> dict[str, Any] | None:
    """The figures of this peer. None, with a note, where it fails: then it is ended, and among ``peers`` no more. None
    if it is not among them."""
    if name not in peers:
        return None
    try:
        return peers[name].run(**task)
    except ContenderFailed as error:
        result.notes.append(f"{name} failed: {error}")
        print(result.notes[-1], flush=True)
        peers.pop(name).close()
        return None


def chat_ids(texts: list[str]) -> list[list[int]]:
    """Questions as the model reads them, template and all."""
    chat = Chat.load(ours())
    return [list(chat.prompt([{"role": "user", "content": text}])) for text in texts]


def adapters(count: int) -> list[Path]:
    """PEFT folders of so many different adapters on every linear layer."""
    config = DecoderConfig.read(ours())
    folders = []
    for seed in range(count):
        folder = WORK / f"adapter-{seed}"
        if not (folder / "adapter_model.safetensors").exists():
            with whole(folder) as made:
                write_adapter(made, trained_adapter(config, seed), MODEL)
        folders.append(folder)
    return folders
