"""A running ``vllm serve`` as a backend, through its HTTP API and its run-time LoRA endpoints.

Promises:

* A server that does not answer, serves no completions or allows no adapters is refused with one line that says how to
  start it. Its other users are not affected, except by the load.
* A server that sends no token of a text for :data:`SILENT_SECONDS`, or does not complete another answer in that time,
  has failed that request, whatever else it sends.
* Adapters are loaded under names that begin with ``rookery-``, which no other worker uses, and unloaded when they are
  not needed. The server reads them from this worker's cache folder: it runs on this machine, or mounts that folder at
  the same path. A restarted server gets them again when a request needs them.
* Log-probabilities are those at temperature 1, since a server reports no others: requests at other temperatures than 1
  and 0 are refused.
* Where the server has the keyed sampler (``keyed_sampler``; probed at the start), the same seed gives the same text and
  a resumed text continues in its stream. Elsewhere vLLM's generator samples, seeded with (seed, position of the first
  token): a resumed text is a sample from the same distribution, but another one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx

from rookery.errors import Unavailable, UserError, count_of, short
from rookery.lines import LineSplitter
from rookery.network import http_tls
from rookery.settings import Settings
from rookery.worker.engine.base import EngineLimits
from rookery.worker.engine.sampler import SamplingKey, row_keys
from rookery.worker.engine.vllm.backend import (
    POSITION,
    SEED,
    TEMPERATURE,
    AdapterLost,
    LoadedAdapter,
    SampledPart,
    SamplingTask,
    ServerFault,
    TaskFailed,
    VllmBusy,
    VllmEnded,
    scores_of,
)
from rookery.worker.memory import MemoryUse

log = logging.getLogger("rookery.engine")

CONNECT_SECONDS = 10.0
"""Time in which a server accepts a connection, and gives the answers that cost it nothing."""

SILENT_SECONDS = 600.0
"""Time in which the next token of a text comes, the first one included, which may wait for others' texts; and for the
whole of another answer: an adapter is loaded from a disk, a prompt is scored at once. A text takes no longer than this
for each token that it asks for."""

METRICS_SECONDS = 2.0
"""Age of the reported use of the cache."""

PROBE_TEMPERATURE = 1e6
"""At which every token is nearly as likely: two seeds that sample the same one are no keys."""

BUSY = (429, 502, 503, 504)
"""Status codes of a server that is full, starts, ends, or is not reached by its proxy."""
NOT_FOUND, SERVER_ERRORS = 404, 500

START = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"


class Attached:
    tempered = False

    def __init__(self, settings: Settings, silent_seconds: float = SILENT_SECONDS) -> None:
        self._silent_seconds = silent_seconds
        self.url = settings.engine.vllm_url.rstrip("/")
        self.max_adapters = settings.engine.vllm_adapters
        self.keyed = False
        self._max_rows, self._max_rank = settings.engine.max_rows, settings.engine.max_rank
        self._model = ""
        self._use = MemoryUse(0, 0)
        self._free_tokens = 0
        self._use_read = 0.0

    async def start(self) -> None:
        timeout = httpx.Timeout(self._silent_seconds, connect=CONNECT_SECONDS)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=self.url, timeout=timeout, verify=http_tls(self.url), limits=limits, trust_env=False
        )
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS, self._silent_seconds)):
                models = (await self._http.get("/v1/models")).raise_for_status().json()["data"]
                card = next(card for card in models if not card.get("parent"))
                context = int(card["max_model_len"])
                lora = await self._http.post("/v1/unload_lora_adapter", json={"lora_name": "rookery-probe"})
        except (httpx.TransportError, TimeoutError) as error:
            raise Unavailable(f"no vLLM server answers at {self.url} ({type(error).__name__})") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, StopIteration):
            raise UserError(f"setting ROOKERY_VLLM_URL: {self.url} is no vLLM server") from None
        if lora.json() == {"detail": "Not Found"}:
            raise UserError(f"the vLLM server at {self.url} allows no adapters at run time: {START}")
        self._model = card["id"]
        self.limits = EngineLimits(self._max_rows, context, self._max_rank)
        try:
            self.keyed = await self._probe()
        except TaskFailed as error:
            raise UserError(f"the vLLM server at {self.url} serves no completions of token ids: {error}") from None
        text = await self._read_metrics()
        if (holds := re.search(r'max_lora="(\d+)"', text)) and 0 < int(holds[1]) < self.max_adapters:
            raise UserError(
                f"the vLLM server at {self.url} holds {count_of(int(holds[1]), 'adapter')}, this worker up to"
                f" {self.max_adapters}: raise --max-loras, or lower ROOKERY_VLLM_ADAPTERS"
            )
        if not self.keyed:
            log.warning(
                "the vLLM server at %s has no keyed sampler: resumed texts are other samples. Start it with "
                "--logits-processors rookery.worker.engine.vllm.keyed_sampler:KeyedSampler",
                self.url,
            )

    async def _probe(self) -> bool:
        """Whether the keyed sampler is there. Raises ``UserError`` for a server whose log-probabilities are others."""
        found = []
        for seed in (1, 2):
            task = SamplingTask("probe", None, [1, 2, 3], seed, 0, PROBE_TEMPERATURE, 1, [])
            parts = [part async for part in self._stream(task, keyed=True)]
            found.append((parts[0].tokens, parts[0].logprobs))
        if found[0][0] == found[1][0]:
            return False
        if found[0][1] == found[1][1]:
            raise UserError(f"the vLLM server at {self.url} must run with --logprobs-mode raw_logprobs")
        return True

    async def load(self, adapter: LoadedAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        answer = await self._post("/v1/load_lora_adapter", body)
        if answer.status_code in BUSY or answer.status_code >= SERVER_ERRORS:
            raise self._problem(answer.status_code, _reason(answer), adapter)
        if answer.is_error:
            raise UserError(f"the vLLM server at {self.url} cannot load {adapter.folder}: {_reason(answer)}")

    async def unload(self, adapter: LoadedAdapter) -> None:
        answer = await self._post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        if answer.status_code in BUSY or answer.status_code >= SERVER_ERRORS:
            raise self._problem(answer.status_code, _reason(answer), adapter)
        if answer.is_error and answer.status_code != NOT_FOUND:
            log.warning("the vLLM server at %s has not unloaded %s: %s", self.url, adapter.name, _reason(answer))

    async def sample(self, task: SamplingTask) -> AsyncIterator[SampledPart]:
        await self._read_metrics()
        if task.scored:
            body = {**self._body(task, keyed=False), "max_tokens": 1, "prompt_logprobs": task.top_logprobs}
            answer = await self._post("/v1/completions", body)
            if answer.is_error:
                raise self._problem(answer.status_code, _reason(answer), task.adapter)
            lines = answer.json()["choices"][0]["prompt_logprobs"]
            given = [line and {int(token): (x["logprob"], x["rank"]) for token, x in line.items()} for line in lines]
            yield SampledPart([], [], scores_of(task.scored, task.tokens, given, task.top_logprobs))
        async for part in self._stream(task, keyed=self.keyed):
            yield part

    async def _stream(self, task: SamplingTask, *, keyed: bool) -> AsyncIterator[SampledPart]:
        body = {**self._body(task, keyed=keyed), "stream": True}
        try:
            async with AsyncExitStack() as opened, asyncio.timeout(self._silent_seconds) as limit:
                response = await opened.enter_async_context(self._http.stream("POST", "/v1/completions", json=body))
                if response.is_error:
                    await response.aread()
                    raise self._problem(response.status_code, _reason(response), task.adapter)
                async for event in _events(response):
                    if "error" in event:
                        error = event["error"]
                        message, code = short(str(error.get("message", error))), error.get("code", 0)
                        raise self._problem(code if isinstance(code, int) else 0, message, task.adapter)
                    choice = event["choices"][0] if event.get("choices") else {}
                    if choice.get("token_ids"):
                        limit.reschedule(None)  # whoever takes the part may take its time
                        yield SampledPart(choice["token_ids"], choice["logprobs"]["token_logprobs"])
                        limit.reschedule(asyncio.get_running_loop().time() + self._silent_seconds)
        except (TimeoutError, httpx.ReadTimeout):
            raise ServerFault(f"the vLLM server at {self.url} sends no token for {self._silent_seconds:g} s") from None
        except httpx.TransportError as error:
            raise VllmEnded(f"the vLLM server at {self.url} stopped answering ({type(error).__name__})") from None

    def _body(self, task: SamplingTask, *, keyed: bool) -> dict[str, Any]:
        """Every parameter is given: a server may have other defaults."""
        name = task.adapter.name if task.adapter is not None else self._model
        body = {
            "model": name, "prompt": task.tokens, "max_tokens": task.max_tokens, "temperature": task.temperature,
            "seed": _seed(task), "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": task.stop_tokens, "ignore_eos": True,
            "logprobs": 0, "return_token_ids": True, "add_special_tokens": False, "cache_salt": task.salt,
        }  # fmt: skip
        if keyed:
            key = {SEED: task.seed, POSITION: task.position, TEMPERATURE: task.temperature}
            body |= {"temperature": 0.0, "vllm_xargs": key}
        return body

    def _problem(self, status: int, reason: str, adapter: LoadedAdapter | None) -> Exception:
        """The exception for an answer of an error's ``status`` to a task of ``adapter``."""
        if status in BUSY:
            return VllmBusy(f"the vLLM server at {self.url} takes no requests at present: {reason}")
        if status == NOT_FOUND and adapter is not None:
            return AdapterLost(reason)
        return ServerFault(reason) if status >= SERVER_ERRORS else TaskFailed(reason)

    async def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        try:
            async with asyncio.timeout(self._silent_seconds):
                return await self._http.post(path, json=body)
        except (TimeoutError, httpx.ReadTimeout):
            shown = f"the vLLM server at {self.url} does not answer {path} within {self._silent_seconds:g} s"
            raise ServerFault(shown) from None
        except httpx.TransportError as error:
            raise VllmEnded(f"the vLLM server at {self.url} stopped answering ({type(error).__name__})") from None

    async def _read_metrics(self) -> str:
        """Read the use of the cache, as far as the server reports it; answers all that it reports."""
        if time.monotonic() - self._use_read < METRICS_SECONDS:
            return ""
        self._use_read = time.monotonic()
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS, self._silent_seconds)):
                text = (await self._http.get("/metrics")).text
        except (httpx.TransportError, TimeoutError):
            return ""  # the request that follows raises
        share = re.search(r"^vllm:kv_cache_usage_perc\{.*?\} (\S+)", text, re.MULTILINE)
        sizes = dict(re.findall(r'(kv_cache_memory_bytes|num_gpu_blocks|block_size)="(\d+)"', text))
        if share:
            used, size = float(share[1]), int(sizes.get("kv_cache_memory_bytes", 0))
            self._use = MemoryUse(int(used * size), size)
            self._free_tokens = int((1 - used) * int(sizes.get("num_gpu_blocks", 0)) * int(sizes.get("block_size", 0)))
        return text

    def kv_cache(self) -> MemoryUse:
        return self._use

    def free_tokens(self) -> int:
        return self._free_tokens

    async def close(self) -> None:
        await self._http.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a streamed response."""
    lines = LineSplitter()
    async for chunk in response.aiter_bytes():
        for line in lines.feed(chunk):
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def _seed(task: SamplingTask) -> int:
    """A seed of 63 bits for vLLM's generator."""
    return int(row_keys([SamplingKey(task.seed, task.position, task.temperature)])[0] >> 1)


def _reason(answer: httpx.Response) -> str:
    """A failed answer's message, on one line."""
    try:
        body = answer.json()
        message = body.get("error", {}).get("message") or body.get("message") or body
    except (ValueError, AttributeError):
        message = f"HTTP {answer.status_code}"
    return " ".join(str(message).split())
