"""A worker that fronts a vLLM server: one that answers as vLLM's does, and may be restarted, full or faulty."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.families import SIZES, small_config
from tests.support.small_model import save_small_model

from rookery import protocol
from rookery.errors import Unavailable, UserError
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.tokenization.registry import recorded_projections
from rookery.worker.engine.vllm.backend import ServerFault, VllmBusy, VllmEnded
from rookery.worker.engine.vllm.engine import VllmEngine
from rookery.worker.engine.vllm.loading import load_vllm
from rookery.worker.failures import PassingFault, WorkerBroken, failure_category
from rookery.worker.memory import TooSmall
from rookery.worker.model.adapter import Adapter, init_adapter, write_adapter
from rookery.worker.model.canary import canary_tokens, write_canary
from rookery.worker.model.convert import prepare

CONTEXT = 32
"""Of the server; the model's is 512."""


@dataclass
class Server:
    """The state of a server."""

    adapters: dict[str, str] = field(default_factory=dict)
    """Folders by name."""
    loads: int = 0
    ignores_adapters: bool = False
    failures: list[int] = field(default_factory=list)
    """Statuses of its next answers to completions; 0 is an answer that ends after a token with an error."""
    load_failures: list[int] = field(default_factory=list)
    """Statuses of its next answers to loads; 0 is no answer."""
    unload_failures: list[int] = field(default_factory=list)

    def restart(self) -> None:
        self.adapters.clear()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = body.get("lora_name", "")
        if path == "/v1/unload_lora_adapter":
            if self.unload_failures:
                return self.unload_failures.pop(0), {"error": {"message": "a failure"}}
            return (200, "") if self.adapters.pop(name, "") else (404, {"error": {"message": "none"}})
        if path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return 400, {"error": {"message": f"{name} has already been loaded"}}
            self.loads += 1
            if self.load_failures:
                status = self.load_failures.pop(0)
                return status, {"error": {"message": f"a failure of {status}"}}
            self.adapters[name] = body["lora_path"]
            return 200, ""
        status = self.failures.pop(0) if self.failures else 200
        if status not in (0, 200):
            return status, {"error": {"message": f"a failure of {status}"}}
        if body["model"] != "base" and body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        changed = 1 if body["model"] != "base" and not self.ignores_adapters else 0
        if "prompt_logprobs" in body:
            tokens = body["prompt"]
            lines = [{str(token): {"logprob": -1.0 - changed / 4, "rank": 1}} for token in tokens]
            return 200, {"choices": [{"prompt_logprobs": [None, *lines[1:]]}]}
        first, seed = len(body["prompt"]), body.get("vllm_xargs", body).get("rookery_seed", 0)
        tokens = [(seed + first + i + changed) % 97 for i in range(body["max_tokens"])]
        return status, tokens


@pytest.fixture
def server() -> Iterator[tuple[Server, str]]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.write(200, json.dumps({"data": [{"id": "base", "max_model_len": CONTEXT}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = state.answer(self.path, body)
            if isinstance(answer, list):
                lines = [
                    {"choices": [{"token_ids": [token], "logprobs": {"token_logprobs": [-token / 100]}}]}
                    for token in answer
                ]
                if status == 0:
                    lines[1:] = [{"error": {"message": "the engine had a fault", "code": 500}}]
                self.write(200, b"".join(b"data: " + json.dumps(line).encode() + b"\n\n" for line in lines))
            elif status == 0:
                self.close_connection = True
            else:
                self.write(status, json.dumps(answer).encode())

        def write(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *about: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,)).start()
        yield state, f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fronted")
    folder = prepare(str(save_small_model(root / "small")), root / "cache")
    save_adapter(folder, root / "cache" / "adapter")
    return folder


def save_adapter(model: Path, folder: Path) -> None:
    projections = recorded_projections(model)
    assert projections is not None
    adapter = init_adapter(projections, 2, 4.0, ["q"], 0)
    weights = {at: (a, torch.ones_like(b)) for at, (a, b) in adapter.weights.items()}
    folder.mkdir()
    write_adapter(folder, Adapter(2, 4.0, weights, prefix=projections.prefix))


def fronting(model: Path, url: str, **settings: Any) -> VllmEngine:
    cache = model.parents[1]
    return load_vllm(model, Settings(inference_engine="vllm", vllm_url=url, cache=cache, **settings), "float32", None)


@pytest.fixture
def engine(model: Path, server: tuple[Server, str]) -> Iterator[VllmEngine]:
    engine = fronting(model, server[1])
    engine.longest_pause = 0.001
    yield engine
    engine.close()


def ref(number: int = 1) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=number, hash=f"hash{number}", rank=2, alpha=4.0)


def generate(engine: VllmEngine, **changes: Any) -> tuple[list[int], str, str]:
    plain: dict[str, Any] = {
        "adapter": ref(), "prompt": [1, 2, 3], "shared_prefix": 0, "max_tokens": 8, "temperature": 1.0, "seed": 7,
        "stop_tokens": [],
    }  # fmt: skip
    engine.submit(protocol.Generate(request="r", **(plain | changes)))
    chunks = []
    while engine.active or engine.waiting:
        engine.step()
        chunks += engine.drain()
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1].finish, chunks[-1].error


WHOLE = ([11, 12, 13, 14, 15, 16, 17, 18], "length", "")


def test_a_restarted_server_gets_its_adapters_again(
    engine: VllmEngine, server: tuple[Server, str], model: Path
) -> None:
    state, _ = server
    engine.add_adapter(ref(), model.parents[1] / "adapter")
    before = list(state.adapters)
    assert generate(engine) == WHOLE
    state.restart()
    loads = state.loads
    for _ in range(2):
        assert generate(engine) == WHOLE
    assert state.loads == loads + 1 and engine.has_adapter("hash1")
    assert len(state.adapters) == 1 and list(state.adapters) != before


@pytest.mark.parametrize("failures", [[429], [503, 503, 502, 504], [500, 500], [0], [0, 503, 0, 500]])
def test_a_request_outlasts_a_busy_or_faulty_server(
    engine: VllmEngine, server: tuple[Server, str], model: Path, failures: list[int]
) -> None:
    engine.add_adapter(ref(), model.parents[1] / "adapter")
    server[0].failures = failures
    assert generate(engine) == WHOLE
    assert not server[0].failures


def test_faults_that_last_end_a_request_and_a_server_that_stays_busy_counts_as_ended(
    engine: VllmEngine, server: tuple[Server, str], model: Path
) -> None:
    engine.add_adapter(ref(), model.parents[1] / "adapter")
    server[0].failures = [500] * 4
    assert generate(engine) == ([], "error", "ServerFault: a failure of 500")
    server[0].failures = [400]
    assert generate(engine) == ([], "error", "TaskFailed: a failure of 400")
    server[0].failures = [503] * 9
    with pytest.raises(Unavailable, match="takes no requests at present: a failure of 503"):
        generate(engine)


@pytest.mark.parametrize(
    ("loads", "completions"),
    [([500], []), ([503, 500], []), ([], [200, 500]), ([], [200, 404]), ([], [200, 503]), ([500], [200, 200, 404])],
)
def test_a_passing_fault_in_the_load_of_an_adapter_ends_no_request(
    engine: VllmEngine, server: tuple[Server, str], model: Path, loads: list[int], completions: list[int]
) -> None:
    """Of a first load and of a later one, whose request meets a lost adapter first (200: it is answered as always)."""
    state, folder = server[0], model.parents[1] / "adapter"
    state.load_failures, state.failures = [*loads], completions[1:2]
    with pytest.raises(PassingFault if (loads or completions[1:])[0] in (404, 500) else VllmBusy) as raised:
        engine.add_adapter(ref(), folder)
    assert failure_category(raised.value) == "lost" and not engine.has_adapter("hash1") and not state.adapters
    state.load_failures, state.failures = [], []
    engine.add_adapter(ref(), folder)
    state.restart()
    state.load_failures, state.failures = [*loads], [*completions]
    assert [generate(engine) for _ in range(2)] == [WHOLE] * 2
    assert engine.has_adapter("hash1") and len(state.adapters) == 1 and not state.load_failures + state.failures


def test_faults_of_an_adapters_loads_that_last_end_its_requests_only(
    engine: VllmEngine, server: tuple[Server, str], model: Path
) -> None:
    engine.add_adapter(ref(), model.parents[1] / "adapter")
    server[0].restart()
    server[0].load_failures = [500] * 8
    _, finish, error = generate(engine)
    assert finish == "error" and error.startswith("AdapterLost: ") and not server[0].load_failures
    assert generate(engine) == WHOLE


def test_a_server_that_does_not_answer_a_load_counts_as_ended(
    engine: VllmEngine, server: tuple[Server, str], model: Path
) -> None:
    server[0].load_failures = [0]
    with pytest.raises(WorkerBroken) as raised:
        engine.add_adapter(ref(), model.parents[1] / "adapter")
    assert isinstance(raised.value, VllmEnded) and failure_category(raised.value) == "lost"


def test_an_adapter_that_cannot_be_loaded_again_is_not_attached(
    engine: VllmEngine, server: tuple[Server, str], model: Path, tmp_path: Path
) -> None:
    save_adapter(model, tmp_path / "adapter")
    engine.add_adapter(ref(), tmp_path / "adapter")
    server[0].restart()
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    assert generate(engine) == ([], "error", "adapter: adapter_model.safetensors is missing")
    assert not engine.has_adapter("hash1")
    save_adapter(model, tmp_path / "again")
    engine.add_adapter(ref(), tmp_path / "again")
    assert generate(engine) == WHOLE


def test_a_request_whose_lost_adapter_left_the_disk_is_for_another_worker(
    engine: VllmEngine, server: tuple[Server, str], model: Path, tmp_path: Path
) -> None:
    save_adapter(model, tmp_path / "adapter")
    engine.add_adapter(ref(), tmp_path / "adapter")
    server[0].restart()
    shutil.rmtree(tmp_path / "adapter")
    for name in "ab":
        engine.submit(
            protocol.Generate(
                request=name,
                adapter=ref(),
                prompt=[1],
                shared_prefix=0,
                max_tokens=8,
                temperature=1.0,
                seed=7,
                stop_tokens=[],
            )
        )
    ends: dict[str, tuple[str, str]] = {}
    while engine.active:
        engine.step()
        ends |= {chunk.request: (chunk.finish, chunk.error) for chunk in engine.drain() if chunk.finish}
    assert ends == {"a": ("abort", ""), "b": ("abort", "")}
    assert not engine.has_adapter("hash1")
    save_adapter(model, tmp_path / "adapter")
    engine.add_adapter(ref(), tmp_path / "adapter")
    assert generate(engine) == WHOLE


@pytest.mark.parametrize("failure", [429, 500, 503])
def test_an_adapter_that_a_server_keeps_is_unloaded_later(
    engine: VllmEngine, server: tuple[Server, str], model: Path, failure: int
) -> None:
    state, folder = server[0], model.parents[1] / "adapter"
    for number in range(Settings().engine.vllm_adapters):
        engine.add_adapter(ref(number), folder)
    state.unload_failures = [failure, failure]
    engine.evict_adapter("hash1")
    assert not engine.has_adapter("hash1") and len(state.adapters) == Settings().engine.vllm_adapters
    engine.add_adapter(ref(100), folder)  # in the place of another one without a request
    assert len(state.adapters) == Settings().engine.vllm_adapters
    state.unload_failures = [failure] * 100
    with pytest.raises(ServerFault, match="unloads none"):  # not NoRoom, which would wait for ever
        engine.add_adapter(ref(101), folder)
    state.unload_failures = []
    engine.add_adapter(ref(101), folder)
    assert len(state.adapters) == Settings().engine.vllm_adapters


def test_processes_name_their_adapters_differently(engine: VllmEngine, server: tuple[Server, str], model: Path) -> None:
    """Also where one was killed, and its adapters stayed in the server."""
    engine.add_adapter(ref(), model.parents[1] / "adapter")
    other = fronting(model, server[1])
    other.add_adapter(ref(), model.parents[1] / "adapter")
    assert generate(other) == WHOLE and len(server[0].adapters) == 2
    other.close()


def test_a_text_that_is_longer_than_the_servers_context_is_for_another_worker(engine: VllmEngine) -> None:
    with pytest.raises(TooSmall, match="a prompt of 16 with an answer has up to 80 tokens; vLLM holds 32 here"):
        generate(engine, adapter=None, prompt=[1] * 16, max_tokens=64)
    tokens, finish, _ = generate(engine, adapter=None, prompt=[1] * 16, max_tokens=16)
    assert (len(tokens), finish) == (16, "length") and engine.longest_text == CONTEXT


def test_the_gap_of_a_refused_version_is_not_reported(engine: VllmEngine, model: Path, tmp_path: Path) -> None:
    save_adapter(model, tmp_path / "adapter")
    count = len(canary_tokens(Chat.load(model).encode)) - 1
    write_canary(tmp_path / "adapter", [-3.0] * count)
    with pytest.raises(UserError, match="differ from the trainer's"):
        engine.add_adapter(ref(), tmp_path / "adapter")
    assert engine.gauges() == {"engine_gap_nats": 0.0}
    write_canary(tmp_path / "adapter", [-1.26] * count)
    engine.add_adapter(ref(), tmp_path / "adapter")
    assert engine.gauges()["engine_gap_nats"] == pytest.approx(0.01)


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3"])
def test_models_of_other_families(family: str, server: tuple[Server, str], tmp_path: Path) -> None:
    """Also with a nested configuration of texts. An adapter that vLLM does not apply is refused."""
    if family == "gemma3":
        text = {name: size for name, size in SIZES.items() if name != "pad_token_id"}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 16, "patch_size": 8}
        config: Any = transformers.Gemma3Config(text_config=text, vision_config=vision)
    else:
        config = small_config(family)
    folder = prepare(str(save_small_model(tmp_path / family, 0, config)), tmp_path / "cache")
    engine = fronting(folder, server[1])
    save_adapter(folder, tmp_path / "adapter")
    engine.add_adapter(ref(1), tmp_path / "adapter")
    assert generate(engine) == WHOLE
    server[0].ignores_adapters = True
    with pytest.raises(UserError, match="vLLM did not apply this adapter"):
        engine.add_adapter(ref(2), tmp_path / "adapter")
    engine.close()
