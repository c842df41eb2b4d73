"""Full-parameter versions beside a base model and a LoRA: each request has the text of an engine with its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.small_model import save_small_model
from tests.support.tiny import COMPUTED
from tests.worker.engine.test_engine import finish, order, text

from rookery import protocol
from rookery.errors import UserError
from rookery.tokenization.registry import WEIGHTS
from rookery.worker.engine.native.cuda.graph_runner import CudaGraphRunner
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import WEIGHTS_SECONDS, DenseRunner, WeightSets
from rookery.worker.memory import NoRoom
from rookery.worker.model.adapter import PARTS, init_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.convert import prepare, read_full_version
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.published import unfuse

KV = 1 << 24
PROMPT = list(range(20))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The prepared base model, and two full-parameter versions of it."""
    root = tmp_path_factory.mktemp("models")
    base, *versions = [save_small_model(root / f"model {seed}", seed) for seed in range(3)]
    return [prepare(str(base), root / "cache"), *versions]


def ref(version: int, rank: int = 0) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=version, hash=f"v{version}", rank=rank, alpha=1.0)


NO_WHOLE_BLOCKS = pytest.mark.skipif(
    torch.float32 == COMPUTED, reason="a CPU's float32 products want blocks of rows, a GPU's graphs have none"
)
RunnerClass = type[DenseRunner] | type[CudaGraphRunner]


def engine(
    base: Decoder, runner: RunnerClass = DenseRunner, room: int = KV, turn_seconds: float = WEIGHTS_SECONDS
) -> NativeEngine:
    loras = LoraManager(base.config, base.dtype, base.device, 16, room)
    return NativeEngine(WeightSets(base, loras, runner(base, loras, KV), turn_seconds), text, max_rows=8)


def texts(engine: NativeEngine) -> dict[str, list[tuple[int, float]]]:
    """Tokens of every request with their log-probabilities."""
    found: dict[str, list[tuple[int, float]]] = {}
    while engine.step() or engine.active or engine.waiting:
        for chunk in engine.drain():
            found.setdefault(chunk.request, []).extend(zip(chunk.tokens, chunk.logprobs, strict=True))
    return found


@pytest.mark.parametrize("runner", [DenseRunner, pytest.param(CudaGraphRunner, marks=NO_WHOLE_BLOCKS)])
def test_versions_base_and_lora_share_an_engine(folders: list[Path], runner: RunnerClass) -> None:
    base = Decoder.load(folders[0], COMPUTED)
    shared = engine(base, runner, turn_seconds=0.0)  # slice by slice
    for version in (1, 2):
        shared.add_adapter(ref(version), folders[version])
    lora = init_adapter(base.config, 4, 8.0, list(PARTS), 0)
    for _, b in lora.weights.values():
        b.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    shared.loras.add("v3", lora)
    refs = {"one": ref(1), "two": ref(2), "base": None, "lora": ref(3, 4)}
    for name, adapter in refs.items():
        shared.submit(order(name, adapter=adapter, prompt=PROMPT, shared_prefix=16))
    together = texts(shared)
    alone = {}
    for name, decoder in {"one": 1, "two": 2, "base": 0, "lora": 0}.items():
        single = engine(read_full_version(folders[decoder], base) if decoder else base, runner)
        single.loras.add("v3", lora)
        adapter = refs["lora"] if name == "lora" else None
        single.submit(order(name, adapter=adapter, prompt=PROMPT, shared_prefix=16))
        alone |= texts(single)
    assert together == alone
    assert len({tuple(text) for text in alone.values()}) == 4


def test_a_version_in_use_is_added_again_without_another_copy(folders: list[Path]) -> None:
    base = Decoder.load(folders[0], COMPUTED)
    shared = engine(base)
    shared.loras.add("v3", init_adapter(base.config, 4, 8.0, list(PARTS), 0))
    shared.add_adapter(ref(1), folders[1])
    for version in (ref(1), ref(3, 4)):
        shared.submit(order(version.hash, adapter=version))
        shared.evict_adapter(version.hash)
        assert not shared.has_adapter(version.hash)
        shared.add_adapter(version, Path("it is not read"))
        assert shared.has_adapter(version.hash)
    finish(shared)
    assert shared.has_adapter("v1") and shared.has_adapter("v3")


def test_a_request_switches_to_the_next_version(folders: list[Path]) -> None:
    shared = engine(Decoder.load(folders[0], COMPUTED))
    shared.add_adapter(ref(1), folders[1])
    shared.submit(order(adapter=ref(1), in_flight="recompute"))
    chunks: list[protocol.TokenChunk] = []
    while sum(len(chunk.tokens) for chunk in chunks) < 4:
        shared.step()
        chunks += shared.drain()
    shared.add_adapter(ref(2), folders[2])
    assert shared.switch_adapter("r", ref(2), recompute=True)
    before = [token for chunk in chunks for token in chunk.tokens]
    after, last = finish(shared)["r"]
    assert last.version == 2
    shared.submit(order(adapter=ref(2), prefix_tokens=before))
    assert finish(shared)["r"][0] == after
    shared.evict_adapter("v1")
    shared.evict_adapter("v2")
    shared.drain()
    assert shared.weights.decoder is shared.decoder and shared.memory()["adapters"].used == 0


def test_versions_wait_for_room_and_too_large_ones_are_refused(folders: list[Path]) -> None:
    base = Decoder.load(folders[0], COMPUTED)
    shared = engine(base, room=2 * base.bytes)
    for version in (1, 2):
        shared.add_adapter(ref(version), folders[version])
        shared.submit(order(f"r{version}", adapter=ref(version)))
    with pytest.raises(NoRoom):
        shared.add_adapter(ref(3), folders[1])
    finish(shared)
    shared.add_adapter(ref(3), folders[1])
    with pytest.raises(UserError, match=r"two full-parameter versions of .* do not fit"):
        engine(base, room=base.bytes).add_adapter(ref(1), folders[1])


def test_unfused_weights_fuse_to_the_same(folders: list[Path]) -> None:
    from safetensors.torch import load_file

    from rookery.worker.model.published import fuse

    config, fused = DecoderConfig.read(folders[0]), load_file(folders[0] / WEIGHTS)
    again = fuse(config, unfuse(config, fused))
    assert again.keys() == fused.keys() and all(torch.equal(again[name], fused[name]) for name in fused)
