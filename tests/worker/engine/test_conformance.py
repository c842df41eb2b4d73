"""The promises of ``engine.base``, kept by each engine: native, vLLM in children of this process, a vLLM server.

vLLM has an environment of its own: ``make test-vllm``. Each engine computes in float32, so that the tokens of a key
agree although the engines add up in different orders."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tests.support.ports import free_port
from tests.support.small_model import save_small_model
from tests.support.tiny import native_engine

from rookery import protocol
from rookery.errors import Unavailable, UserError
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker.engine.base import Engine
from rookery.worker.engine.hf.runner import transformers_runner
from rookery.worker.engine.vllm.loading import load_vllm
from rookery.worker.memory import NoRoom
from rookery.worker.model.adapter import PARTS, Adapter, init_adapter, write_adapter
from rookery.worker.model.canary import canary_tokens, write_canary
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.convert import prepare
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.model.published import published
from rookery.worker.model.transformers_model import TransformersModel

RANK = 8
ROWS = 4
ADAPTERS = 3
CACHE_BYTES = 1 << 26
PROMPT = [104, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100]

WITHOUT_VLLM = importlib.util.find_spec("vllm") is None
VLLM_MARKS = [pytest.mark.heavy, pytest.mark.skipif(WITHOUT_VLLM, reason="make test-vllm")]


@dataclass
class Conforming:
    kind: str
    engine: Engine
    folder: Path
    """Of the prepared model and, beside it, the adapters."""

    def add(self, number: int) -> protocol.AdapterRef:
        """Attaches version ``number``."""
        ref = version(number)
        self.engine.add_adapter(ref, self.folder.parent / f"v{number}")
        return ref


def version(number: int, rank: int = RANK) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=number, hash=f"hash{number}", rank=rank, alpha=2.0 * rank)


def save_adapter(config: DecoderConfig, folder: Path, seed: int, rank: int = RANK) -> None:
    """A LoRA that really changes texts."""
    new = init_adapter(config, rank, 2.0 * rank, list(PARTS), seed)
    generator = torch.Generator().manual_seed(seed)
    weights = {at: (a, torch.randn(b.shape, generator=generator) * 0.5) for at, (a, b) in new.weights.items()}
    folder.mkdir()
    write_adapter(folder, Adapter(rank, new.alpha, weights))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("conformance")
    folder = prepare(str(save_small_model(root / "small", hidden=128)), root / "cache")
    for number in range(5):
        save_adapter(DecoderConfig.read(folder), folder.parent / f"v{number}", number)
    return folder


def native(folder: Path, _: Settings) -> Engine:
    decoder = Decoder.load(folder, torch.float32)
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, RANK)
    return native_engine(decoder, loras, Chat.load(folder).decode, max_rows=ROWS, kv_budget_bytes=CACHE_BYTES)


def by_transformers(folder: Path, _: Settings) -> Engine:
    model = TransformersModel.load(folder, torch.float32)
    loras = LoraManager(model.projections, model.dtype, model.device, RANK, 1 << 28)
    runner = transformers_runner(model, loras, CACHE_BYTES)
    decode = Chat.load(folder).decode
    return native_engine(model, loras, decode, max_rows=ROWS, kv_budget_bytes=CACHE_BYTES, runner=runner)


def in_process(folder: Path, settings: Settings) -> Engine:
    return load_vllm(folder, settings, "float32", CACHE_BYTES)


def attached(folder: Path, settings: Settings) -> Engine:
    here = {"vllm_url": os.environ["CONFORMANCE_SERVER"], "cache": folder.parent / "cache"}
    return load_vllm(folder, settings.replace(**here), "float32", None)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    """A server as its users start it."""
    port = free_port()
    processor = "rookery.worker.engine.vllm.keyed_sampler:KeyedSampler"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(published(model)), "--port",
        str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-num-seqs", str(ROWS), "--kv-cache-memory-bytes",
        str(CACHE_BYTES), "--enable-lora", "--max-loras", str(ADAPTERS), "--max-lora-rank", "8",
        "--lora-target-modules", *(f"{part}_proj" for part in PARTS),
        "--logits-processors", processor,
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("".join(lines[-30:]))
        process.stderr.close()
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.fixture(
    scope="module",
    params=[
        native,
        by_transformers,
        pytest.param(in_process, marks=VLLM_MARKS),
        pytest.param(attached, marks=VLLM_MARKS),
    ],
)
def tested(request: pytest.FixtureRequest, model: Path) -> Iterator[Conforming]:
    start: Callable[[Path, Settings], Engine] = request.param
    if start is attached:
        os.environ["CONFORMANCE_SERVER"] = request.getfixturevalue("server")
    settings = Settings(
        inference_engine="vllm" if start in (in_process, attached) else "auto",
        max_rank=RANK,
        max_rows=ROWS,
        vllm_adapters=ADAPTERS,
    )
    engine = start(model, settings)
    yield Conforming(start.__name__, engine, model)
    engine.close()


def order(name: str = "r", **changes: object) -> protocol.Generate:
    plain: dict[str, object] = {
        "adapter": None, "prompt": PROMPT, "shared_prefix": 0, "max_tokens": 24, "temperature": 1.0, "seed": 7,
        "stop_tokens": [],
    }  # fmt: skip
    return protocol.Generate(request=name, **{**plain, **changes})  # type: ignore[arg-type]


def finish(engine: Engine) -> dict[str, list[protocol.TokenChunk]]:
    """All chunks of each request; offsets are checked on the way."""
    chunks: dict[str, list[protocol.TokenChunk]] = {}
    while True:
        for chunk in engine.drain():
            before = chunks.setdefault(chunk.request, [])
            assert not before or chunk.offset == before[-1].offset + len(before[-1].tokens)
            assert len(chunk.tokens) == len(chunk.logprobs)
            before.append(chunk)
        if not engine.active and not engine.waiting:
            return chunks
        engine.step()


def joined(chunks: list[protocol.TokenChunk]) -> tuple[list[int], list[float]]:
    return [token for chunk in chunks for token in chunk.tokens], [x for chunk in chunks for x in chunk.logprobs]


def generate(engine: Engine, **changes: object) -> tuple[list[int], list[float], protocol.TokenChunk]:
    engine.submit(order(**changes))
    chunks = finish(engine)["r"]
    return *joined(chunks), chunks[-1]


@pytest.fixture(scope="module")
def reference(model: Path) -> Engine:
    """The native engine."""
    return native(model, Settings())


def test_the_same_seed_gives_the_native_engines_text(tested: Conforming, reference: Engine) -> None:
    for temperature in (1.0, 0.0) if tested.kind == "attached" else (1.0, 0.0, 0.7):
        tokens, logprobs, last = generate(tested.engine, temperature=temperature)
        expected, its_logprobs, _ = generate(reference, temperature=temperature)
        assert (tokens, last.finish) == (expected, "length")
        assert logprobs == pytest.approx(its_logprobs, abs=1e-3)
        assert (last.policy, last.version) == ("", 0)
    assert generate(tested.engine, seed=8)[0] != generate(tested.engine, seed=9)[0]


def test_a_resumed_text_continues_in_the_same_stream(tested: Conforming) -> None:
    ref = tested.add(1)
    whole, _, _ = generate(tested.engine, adapter=ref)
    for cut in (1, 13):
        rest, _, last = generate(tested.engine, adapter=ref, prefix_tokens=whole[:cut])
        assert whole[:cut] + rest == whole and last.offset + len(last.tokens) == len(whole)


def test_scores_agree_with_sampled_logprobs(tested: Conforming) -> None:
    ref = tested.add(1)
    tokens, logprobs, _ = generate(tested.engine, adapter=ref)
    scored = {"prompt": PROMPT + tokens, "prompt_logprobs": len(tokens), "top_logprobs": 3, "max_tokens": 1}
    _, _, last = generate(tested.engine, adapter=ref, **scored)
    assert [line.logprob for line in last.prompt_logprobs] == pytest.approx(logprobs, abs=1e-3)
    for line in last.prompt_logprobs:
        best = [logprob for _, logprob in line.top]
        assert len(best) == 3 and best == sorted(best, reverse=True) and best[0] >= line.logprob - 1e-6


def test_stop_tokens_and_stop_strings_end_a_text(tested: Conforming) -> None:
    tokens, _, _ = generate(tested.engine)
    at = tokens.index(tokens[5])
    cut, _, last = generate(tested.engine, stop_tokens=[tokens[5]])
    assert (cut, last.finish) == (tokens[: at + 1], "stop")
    ascii_at = next(i for i, token in enumerate(tokens) if token < 94)  # a byte that is a character
    stop = Chat.load(tested.folder).decode([tokens[ascii_at]])
    cut, _, last = generate(tested.engine, stop=[stop])
    assert (cut, last.finish) == (tokens[: tokens.index(tokens[ascii_at]) + 1], "stop")
    done, _, last = generate(tested.engine, prefix_tokens=tokens[:3], max_tokens=3)
    assert (done, last.finish, last.offset) == ([], "length", 3)


def test_the_context_ends_a_text(tested: Conforming) -> None:
    context = tested.engine.limits.max_context
    tokens, _, last = generate(tested.engine, prompt=[5] * (context - 3))
    assert (len(tokens), last.finish) == (3, "length")


def test_each_version_has_its_text(tested: Conforming) -> None:
    refs = [tested.add(1), tested.add(2)]
    tested.add(1)  # once more: nothing happens
    for n in range(2 * ROWS):  # more than compute at once
        tested.engine.submit(order(f"r{n}", adapter=refs[n % 2], seed=n // 2, max_tokens=8))
    chunks = finish(tested.engine)
    texts = {n: joined(chunks[f"r{n}"])[0] for n in range(2 * ROWS)}
    assert all(len(tokens) == 8 for tokens in texts.values())
    assert all(texts[n] != texts[n + 1] for n in range(0, 2 * ROWS, 2))
    assert {(chunk.policy, chunk.version) for chunk in chunks["r1"]} == {("p", 2)}
    of_base = generate(tested.engine)[2]
    assert (of_base.policy, of_base.version) == ("", 0)


def test_adapters_leave_when_their_last_request_has_ended(tested: Conforming) -> None:
    engine, ref = tested.engine, tested.add(1)
    assert engine.has_adapter(ref.hash) and ref.hash in engine.adapters()
    alone = generate(engine, adapter=ref)[0]
    engine.submit(order(adapter=ref))
    engine.evict_adapter(ref.hash)
    engine.evict_adapter("unknown")
    with pytest.raises(ValueError, match="not resident"):
        engine.submit(order("late", adapter=ref))
    assert joined(finish(engine)["r"])[0] == alone
    assert not engine.has_adapter(ref.hash)
    assert generate(engine, adapter=tested.add(1))[0] == alone


def test_adapters_in_use_leave_no_room(tested: Conforming) -> None:
    if tested.kind in ("native", "by_transformers"):
        pytest.skip("its limit is memory: tests of its adapters")
    for number in range(1, 1 + ADAPTERS):
        tested.engine.submit(order(f"r{number}", adapter=tested.add(number)))
    with pytest.raises(NoRoom):
        tested.add(4)
    finish(tested.engine)
    tested.add(4)
    assert len(tested.engine.adapters()) <= ADAPTERS and tested.engine.has_adapter("hash4")


def test_a_request_switches_to_a_newer_version(tested: Conforming) -> None:
    engine, old, new = tested.engine, tested.add(1), tested.add(2)
    engine.submit(order(adapter=old, max_tokens=40))
    before: list[protocol.TokenChunk] = []
    while not before:
        engine.step()
        before += engine.drain()
    assert engine.switch_adapter("r", new, recompute=True)
    with pytest.raises(ValueError, match="does not run on policy"):
        engine.switch_adapter(
            "r", protocol.AdapterRef(policy="q", version=3, hash="hash1", rank=8, alpha=1), recompute=True
        )
    chunks = before + finish(engine)["r"]
    tokens, _ = joined(chunks)
    versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
    assert [number for number, _ in groupby(versions)] == [1, 2] and len(tokens) == 40
    switched = versions.index(2)
    rest, _, _ = generate(engine, adapter=new, max_tokens=40, prefix_tokens=tokens[:switched])
    assert tokens[switched:] == rest
    assert not engine.switch_adapter("r", new, recompute=True)


def test_an_abort_touches_no_other_request(tested: Conforming) -> None:
    alone, _, _ = generate(tested.engine)
    tested.engine.submit(order())
    tested.engine.submit(order("other", seed=9, max_tokens=200))
    tested.engine.step()
    tested.engine.abort("other")
    tested.engine.abort("unknown")
    chunks = finish(tested.engine)
    assert chunks["other"][-1].finish == "abort" and joined(chunks["r"])[0] == alone


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [1] * 600}, "context is"),
        ({"prompt": [1, 100_000]}, "vocabulary"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": math.nan}, "temperature"),
        ({"adapter": version(9)}, "not resident"),
    ],
)
def test_impossible_requests_are_refused(tested: Conforming, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tested.engine.submit(order(**changes))
    assert not tested.engine.active and not tested.engine.drain()


def test_adapters_of_another_base_and_over_the_rank_are_refused(tested: Conforming, tmp_path: Path) -> None:
    other = prepare(str(save_small_model(tmp_path / "other")), tmp_path / "cache")
    save_adapter(DecoderConfig.read(other), tmp_path / "wrong", 0)
    save_adapter(DecoderConfig.read(tested.folder), tmp_path / "large", 0, rank=2 * RANK)
    for folder, ref, says in (
        (tmp_path / "wrong", version(6), "does not fit this base model"),
        (tmp_path / "large", version(7, 2 * RANK), "rank"),
        (tmp_path / "missing", version(8), "missing"),
    ):
        with pytest.raises(UserError, match=says) as refusal:
            tested.engine.add_adapter(ref, folder)
        assert "\n" not in str(refusal.value) and not tested.engine.has_adapter(ref.hash)
    assert len(generate(tested.engine)[0]) == 24  # it lives


def test_a_server_for_lower_ranks_is_refused_at_the_start(tested: Conforming) -> None:
    if tested.kind != "attached":
        pytest.skip("an engine in the worker is built for its ranks")
    with pytest.raises(UserError, match=f"start it with --max-lora-rank {2 * RANK}") as refusal:
        attached(tested.folder, Settings(inference_engine="vllm", max_rank=2 * RANK, vllm_adapters=ADAPTERS))
    assert "\n" not in str(refusal.value)


def test_a_version_that_vllm_computes_otherwise_is_refused(
    tested: Conforming, reference: Engine, tmp_path: Path
) -> None:
    if tested.kind in ("native", "by_transformers"):
        pytest.skip("its arithmetic is the trainer's")
    config = DecoderConfig.read(tested.folder)
    save_adapter(config, tmp_path / "v", 11)
    tokens = canary_tokens(Chat.load(tested.folder).encode)
    reference.add_adapter(version(11), tmp_path / "v")
    scored = {"adapter": version(11), "prompt": tokens, "prompt_logprobs": len(tokens), "max_tokens": 1}
    _, _, last = generate(reference, **scored)
    logprobs = [line.logprob for line in last.prompt_logprobs]
    write_canary(tmp_path / "v", logprobs)
    tested.engine.add_adapter(version(11), tmp_path / "v")
    assert 0 < tested.engine.gauges()["engine_gap_nats"] < 1e-3
    tested.engine.evict_adapter("hash11")
    assert tested.engine.gauges()["engine_gap_nats"] == 0
    write_canary(tmp_path / "v", [logprob - 2 for logprob in logprobs])
    with pytest.raises(UserError, match=r"p version 11: .* differ from the trainer's by 2\.00 nats per token"):
        tested.engine.add_adapter(version(11), tmp_path / "v")
    about = json.loads((tmp_path / "v" / "adapter_config.json").read_text())
    (tmp_path / "v" / "adapter_config.json").write_text(json.dumps(about | {"lora_alpha": 0}))
    with pytest.raises(UserError, match="vLLM did not apply this adapter"):
        tested.engine.add_adapter(version(11), tmp_path / "v")
    assert not tested.engine.has_adapter("hash11")


def test_the_use_of_the_cache_is_reported(tested: Conforming) -> None:
    use = tested.engine.memory()["kv_cache"]
    assert 0 <= use.used <= use.budget and use.budget > 0 and tested.engine.free_tokens > 0


class Elsewhere(BaseHTTPRequestHandler):
    """A server of another kind; ``models`` is what it answers for them."""

    models: ClassVar[dict[str, object]] = {}

    def do_GET(self) -> None:
        self.answer(200, self.models)

    def do_POST(self) -> None:
        self.answer(404, {"detail": "Not Found"})

    def answer(self, status: int, body: dict[str, object]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None: ...


class WithoutAdapters(Elsewhere):
    """A vLLM server that allows no adapters at run time."""

    models: ClassVar[dict[str, object]] = {"data": [{"id": "m", "max_model_len": 512}]}


def test_a_server_that_cannot_be_fronted_is_refused(model: Path) -> None:
    def start(port: int) -> None:
        settings = Settings(inference_engine="vllm", vllm_url=f"http://127.0.0.1:{port}")
        load_vllm(model, settings, "float32", None)

    with pytest.raises(Unavailable, match="no vLLM server answers at http:"):
        start(free_port())
    for kind, problem in (
        (Elsewhere, "is no vLLM server"),
        (WithoutAdapters, "allows no adapters at run time: start it with VLLM_ALLOW_RUNTIME_LORA"),
    ):
        with ThreadingHTTPServer(("127.0.0.1", 0), kind) as other:
            threading.Thread(target=other.serve_forever, daemon=True).start()
            with pytest.raises(UserError, match=problem):
                start(other.server_port)
            other.shutdown()


def test_limits_are_checked_before_anything_is_loaded(model: Path) -> None:
    with pytest.raises(UserError, match="ROOKERY_MAX_RANK: given 600, vLLM's limit is 512"):
        load_vllm(model, Settings(inference_engine="vllm", max_rank=600), "float32", None)
    with pytest.raises(UserError, match="ROOKERY_VLLM_ADAPTERS"):
        Settings.load({"ROOKERY_VLLM_ADAPTERS": "1"})
    if WITHOUT_VLLM:
        with pytest.raises(UserError, match=r"vLLM is not installed here: .* install 'rookery"):
            load_vllm(model, Settings(inference_engine="vllm"), "float32", None)
