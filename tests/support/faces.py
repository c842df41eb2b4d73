"""Helpers for tests of the HTTP APIs: a model folder with a tokenizer and almost no weights, and a worker that speaks
the whole protocol over real sockets but computes nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import msgspec
import numpy as np
from safetensors.numpy import save
from tests.support.rules import split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rookery import protocol
from rookery.aio import LoopThread, unless
from rookery.protocol.connection import Channel, ServiceEndpoint, stay_connected
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.tokenization.registry import CONFIG, PREPARED, WEIGHTS, model_folder

Reach = Callable[[EmbeddedService], None]
"""Of the fixture ``reach``."""

MODEL = "qwen3-0.6b"
"""A catalogue name that no test prepares for real: the test's cache has the tiny model in its place."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(cache: Path, model: str = MODEL) -> Path:
    """A prepared model whose tokens are bytes."""
    folder = model_folder(cache, model)
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "qwen3", "max_position_embeddings": 512, "vocab_size": tokenizer.get_vocab_size(),
        "num_hidden_layers": 1, "hidden_size": 8, "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    (folder / WEIGHTS).write_bytes(save({"w": np.zeros(1, np.float32)}))
    (folder / PREPARED).write_text(json.dumps({"name": model, "hash": "0" * 64}))
    return folder


def adapter_files(value: float) -> dict[str, bytes]:
    """A PEFT folder of a model with one layer."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = {"A": (4, 8), "B": (8, 4)}
    weights = {f"{lora}{side}.weight": np.full(shape, value, np.float32) for side, shape in shapes.items()}
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(weights)}


class ThreadedWorker:
    """Replies to every request with one of two texts, chosen by the seed; completes every training step. Runs in a
    thread until the ``with`` block ends, and dials again when its connection closes."""

    def __init__(self, url: str, token: str, tokenizer: Tokenizer, replies: tuple[str, str] = ("4", "five")) -> None:
        self._url = url
        self._token = token
        self._replies = [[*tokenizer.encode(text).ids, tokenizer.token_to_id("<|im_end|>")] for text in replies]
        self._steps = 0
        self.engine = ""
        """``vllm``: one that changes no logits."""
        self.name = "scripted"
        self.gauges: dict[str, float] = {}
        """Of its next heartbeats."""
        self.read: dict[str, bytes] = {}
        """Adapter files that were read, by ``hash/name``."""

    @classmethod
    def of(cls, service: EmbeddedService, replies: tuple[str, str] = ("4", "five")) -> Self:
        """A worker of this service."""
        settings = service.settings
        token = (settings.data / "worker.token").read_text().strip()
        return cls(service.url, token, tokenizer(settings.cache.parent), replies)

    def __enter__(self) -> Self:
        self._thread = LoopThread("scripted", self._work, daemon=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.stop()

    async def _work(self, stopping: asyncio.Event) -> None:
        connected = stay_connected(
            ServiceEndpoint(self._url, "/wire/worker", self._token), protocol.to_worker, hello=self._hello,
            converse=self._converse, ping_seconds=20.0, ping_timeout=20.0,
        )  # fmt: skip
        async with httpx.AsyncClient(base_url=self._url, timeout=60) as self._http:
            await unless(stopping.wait(), connected)

    def _hello(self) -> protocol.Hello:
        return protocol.Hello(
            protocol=protocol.PROTOCOL, name=self.name, instance=self.name, model=MODEL, model_hash="0" * 64,
            roles=["rollout", "train"], max_rows=64, max_context=1 << 20, max_rank=64, device="cpu", dtype="none",
            engine=self.engine,
        )  # fmt: skip

    def signed(self, digest: str) -> dict[str, str]:
        """Headers with which the worker reads an artifact."""
        return {protocol.READ_HEADER: protocol.sign_read(self.reads, digest, time.time())}

    async def _converse(self, channel: Channel[protocol.ToWorker]) -> None:
        assert isinstance(channel.welcome, protocol.Welcome)
        self.reads = channel.welcome.reads
        beat = protocol.Heartbeat(
            progress=0, active=0, waiting=0, training=0, generated=0, decode_seconds=0, train_seconds=0,
        )  # fmt: skip
        messages: asyncio.Queue[protocol.ToWorker] = asyncio.Queue()
        await channel.run(
            messages.put_nowait,
            lambda: msgspec.structs.replace(beat, gauges=self.gauges),
            self._answer(channel, messages),
        )

    async def _answer(self, channel: Channel[protocol.ToWorker], messages: asyncio.Queue[protocol.ToWorker]) -> None:
        while True:
            message = await messages.get()
            try:
                reply = await self._reply(message, self._http)
            except httpx.HTTPError as error:  # the service has deleted or cancelled it meanwhile, or is ending
                reply = self._failed(message, str(error).partition("\n")[0])
            if reply is not None:
                await channel.send(reply)

    def _failed(self, message: protocol.ToWorker, error: str) -> protocol.EpochMessage:
        match message:
            case protocol.Generate():
                chunk = protocol.TokenChunk(
                    request=message.request, assignment=message.assignment, offset=0, tokens=[], logprobs=[],
                    version=0, finish="error", error=error,
                )  # fmt: skip
                return protocol.Output(chunks=[chunk])
            case protocol.Replicate():
                return protocol.PullFailed(hash=message.refs[0].hash, error=error)
        assert isinstance(message, protocol.InitAdapter | protocol.ForwardBackward | protocol.OptimStep), error
        return protocol.OperationDone(op=message.op, error=error, category="lost")

    async def _reply(self, message: protocol.ToWorker, http: httpx.AsyncClient) -> protocol.EpochMessage | None:
        match message:
            case protocol.Generate(logits=logits) if logits is not None and self.engine == "vllm":
                chunk = msgspec.structs.replace(
                    self._chunk(message), tokens=[], logprobs=[], top_logprobs=[], finish="abort", error="no logits"
                )
                return protocol.Output(chunks=[chunk])
            case protocol.Generate():
                if message.adapter is not None:
                    await self._pull(http, message.adapter)
                return protocol.Output(chunks=[self._chunk(message)])
            case protocol.Replicate():
                for ref in message.refs:
                    await self._pull(http, ref)
                return protocol.AdaptersCached(hashes=[ref.hash for ref in message.refs])
            case protocol.InitAdapter():
                manifest = await self._push(http, message.upload, adapter_files(0.0))
                return protocol.OperationDone(op=message.op, manifest=manifest)
            case protocol.ForwardBackward():
                offered = (await http.get(f"/wire/batches/{message.batch_ticket}")).raise_for_status().content
                found = protocol.decode(protocol.batches, offered)
                targets = sum(len(datum.targets) for datum in found.data)
                members = [member for unit in found.groups for member in unit.members]
                count = sum(len(member.tokens) for member in members)
                if message.logprobs:
                    targets += sum(weight != 0 for member in members for weight in member.weights)
                return protocol.OperationDone(
                    op=message.op, metrics={"loss:sum": 1.0, "tokens": float(count)},
                    logprobs=np.zeros(targets, np.float32).tobytes(),
                )  # fmt: skip
            case protocol.OptimStep():
                self._steps += 1
                files = {**adapter_files(self._steps), "trainer_state.safetensors": b"secret moments"}
                manifest = await self._push(http, message.upload, files) if message.upload else None
                metrics = {"grad_norm": 1.0, "lr": message.adam.lr if message.adam else 0.0, "skipped": 0.0}
                return protocol.OperationDone(op=message.op, metrics=metrics, manifest=manifest)
        return None

    def _chunk(self, message: protocol.Generate) -> protocol.TokenChunk:
        tokens = self._replies[message.seed % 2][len(message.prefix_tokens) : message.max_tokens]
        version = message.adapter.version if message.adapter is not None else 0
        policy = message.adapter.policy if message.adapter is not None else ""
        likeliest = message.logits.top_logprobs if message.logits is not None else 0
        return protocol.TokenChunk(
            request=message.request, assignment=message.assignment, offset=len(message.prefix_tokens), tokens=tokens,
            logprobs=[-0.5] * len(tokens), version=version, policy=policy, finish="stop",
            top_logprobs=[[(token, -0.5)] * likeliest for token in tokens] if likeliest else [],
        )  # fmt: skip

    async def _pull(self, http: httpx.AsyncClient, ref: protocol.AdapterRef) -> None:
        name = f"{ref.hash}/adapter_model.safetensors"
        if name not in self.read:
            headers = self.signed(ref.hash)
            self.read[name] = (await http.get(f"/wire/artifacts/{name}", headers=headers)).raise_for_status().content
            headers["Range"] = "bytes=10-"
            rest = (await http.get(f"/wire/artifacts/{name}", headers=headers)).raise_for_status()
            self.read[f"{name} from byte 10"] = rest.content if rest.status_code == 206 else b""

    async def _push(self, http: httpx.AsyncClient, ticket: str, files: dict[str, bytes]) -> protocol.Manifest:
        shards = []
        for name, content in files.items():
            answer = (await http.put(f"/wire/uploads/{ticket}/{name}", content=content)).raise_for_status()
            shards.append(protocol.Shard(**answer.json()))
        return protocol.manifest_of(shards)


@contextmanager
def served(root: Path, **more: Any) -> Iterator[EmbeddedService]:
    """A service on a free port with the tiny model in its cache and no workers of its own."""
    more, rules = split(more)
    given: dict[str, Any] = {"port": 0, "models": "", "workers": 0, "heartbeat_seconds": 0.2, **more}
    settings = Settings.load({}, data=root / "data", cache=root / "cache", **given)
    if not model_folder(settings.cache, MODEL).exists():
        write_model(settings.cache)
    with EmbeddedService(settings, rules) as service:
        yield service


def tokenizer(root: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder(root / "cache", MODEL) / "tokenizer.json"))


def job(**more: Any) -> dict[str, Any]:
    """A small job; ``more`` replaces its parts."""
    rows = [{"prompt": f"{a}+{a}?", "answer": "4"} for a in range(8)]
    return {
        "name": "sums",
        "base_model": MODEL,
        "environment": {"id": "jsonl", "rows": rows[:6], "eval_rows": rows[6:], "verifier": "exact"},
        "policies": {"main": {"rank": 4, "targets": ["q"]}},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "stop": {"steps": 2},
        **more,
    }
