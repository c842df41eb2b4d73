"""vLLM's ``AsyncLLM`` as a backend: its scheduler and model run in child processes of this worker.

Promises:

* The limits are checked before anything is loaded; a refusal is one line.
* Log-probabilities are those of the distribution sampled from, and the same seed gives the native engine's text up to
  numerics (:mod:`~rookery.worker.engine.vllm.keyed_sampler`).
* Cached prefixes are reused within a version only.
* vLLM's processes end with this one, also where this one is killed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from rookery.errors import UserError, installs
from rookery.settings import Settings
from rookery.worker.engine.base import EngineLimits
from rookery.worker.engine.vllm.backend import (
    NOT_A_NUMBER,
    POSITION,
    SEED,
    TEMPERATURE,
    LoadedAdapter,
    SampledPart,
    SamplingTask,
    TaskFailed,
    VllmEnded,
    scores_of,
)
from rookery.worker.memory import GPU_MEMORY_SHARE, MemoryUse
from rookery.worker.model.adapter import PARTS
from rookery.worker.transfer.http import one_line

log = logging.getLogger("rookery.engine")

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM has kernels; a smaller adapter is padded."""

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it knows no logits processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # workers and their trainers share the cores
}
"""Defaults of vLLM's own settings in a worker."""


def lora_rank(max_rank: int) -> int:
    """The rank that vLLM is built for. Raises ``UserError`` for a limit above its own."""
    for rank in LORA_RANKS:
        if rank >= max_rank:
            return rank
    raise UserError(f"setting ROOKERY_MAX_RANK: given {max_rank}, vLLM's limit is {LORA_RANKS[-1]}")


class InProcess:
    tempered = True

    def __init__(self, model: Callable[[], Path], settings: Settings, dtype: str, cache_bytes: int | None) -> None:
        """``model()`` answers a folder in the published layout. ``cache_bytes``: of the KV cache; None lets vLLM take
        what its share of the GPU leaves. Raises ``UserError`` where vLLM is missing or a setting exceeds its limits."""
        options = settings.engine
        rank = lora_rank(options.max_rank)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if settings.worker.threads:
            os.environ["OMP_NUM_THREADS"] = str(settings.worker.threads)
        try:
            import vllm
        except ImportError:
            raise UserError(f"engine vllm: vLLM is not installed here: {installs('vllm')}") from None
        module = f"{__package__}.keyed_sampler"
        self._arguments = vllm.AsyncEngineArgs(
            model=str(model()),
            max_model_len=-1,  # the model's context, or as much of it as the cache holds
            dtype=dtype,
            max_num_seqs=options.max_rows,
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=options.vllm_adapters,
            max_cpu_loras=options.vllm_adapters,
            max_lora_rank=rank,
            lora_target_modules=[
                f"{part}_proj" for part in PARTS
            ],  # with the head too, scored prompts end the CPU build
            kv_cache_memory_bytes=cache_bytes,
            gpu_memory_utilization=GPU_MEMORY_SHARE,
            skip_tokenizer_init=True,
            logits_processors=[f"{module}:KeyedSampler"],
            worker_extension_cls=f"{module}.WorkerExtension",
            max_logprobs=-1,
            scheduling_policy="priority",
            disable_log_stats=True,
        )
        self._max_rank = options.max_rank
        self.max_adapters = options.vllm_adapters
        self._usage = 0.0
        self._llm: Any = None

    async def start(self) -> None:
        """Load the model. Raises ``UserError`` if vLLM refuses it."""
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._llm = AsyncLLM.from_engine_args(self._arguments, stat_loggers=[self._stat_logger])
        except Exception as error:
            raise UserError(f"engine vllm: it cannot serve this model: {one_line(error)}") from error
        await self._llm.collective_rpc("report_processed_logits")
        await self._llm.collective_rpc("end_with", args=(os.getpid(),))
        config = self._llm.vllm_config
        self.limits = EngineLimits(self._arguments.max_num_seqs, config.model_config.max_model_len, self._max_rank)
        cache = config.cache_config
        self._cache_bytes = cache.kv_cache_memory_bytes or 0
        self._cache_tokens = (cache.num_gpu_blocks or 0) * cache.block_size

    def _stat_logger(self, *_: Any) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        backend = self

        class CacheUse(StatLoggerBase):
            def __init__(self) -> None: ...

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    backend._usage = scheduler_stats.kv_cache_usage

            def log_engine_initialized(self) -> None: ...

        return CacheUse()

    async def load(self, adapter: LoadedAdapter) -> None:
        try:
            await self._llm.add_lora(self._request(adapter))
        except Exception as error:
            self._raise_if_dead(error)
            raise UserError(f"{adapter.folder}: vLLM cannot load this adapter: {one_line(error)}") from None

    async def unload(self, adapter: LoadedAdapter) -> None:
        await self._llm.remove_lora(adapter.number)

    async def sample(self, task: SamplingTask) -> AsyncIterator[SampledPart]:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=task.max_tokens,
            stop_token_ids=task.stop_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=task.top_logprobs if task.scored else None,
            output_kind=RequestOutputKind.DELTA,
            extra_args={SEED: task.seed, POSITION: task.position, TEMPERATURE: task.temperature},
        )
        prompt = vllm.TokensPrompt(prompt_token_ids=task.tokens, cache_salt=task.salt)
        lora = self._request(task.adapter) if task.adapter is not None else None
        given: list[dict[int, tuple[float, int]] | None] = []
        try:
            async for output in self._llm.generate(
                prompt, params, task.name, lora_request=lora, priority=task.priority
            ):
                part = output.outputs[0]
                logprobs = [line[token].logprob for token, line in zip(part.token_ids, part.logprobs, strict=True)]
                for line in output.prompt_logprobs or []:
                    given.append(line and {token: (entry.logprob, entry.rank) for token, entry in line.items()})
                scores = {}
                if task.scored and len(given) == len(task.tokens):
                    scores = scores_of(task.scored, task.tokens, given, task.top_logprobs)
                    given.clear()
                values = [float("nan") if value == NOT_A_NUMBER else value for value in logprobs]
                yield SampledPart(list(part.token_ids), values, scores)
        except Exception as error:
            self._raise_if_dead(error)
            raise TaskFailed(one_line(error)) from error

    def kv_cache(self) -> MemoryUse:
        return MemoryUse(int(self._usage * self._cache_bytes), self._cache_bytes)

    def free_tokens(self) -> int:
        return int((1 - self._usage) * self._cache_tokens)

    async def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()

    @staticmethod
    def _request(adapter: LoadedAdapter) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(adapter.name, adapter.number, str(adapter.folder))

    def _raise_if_dead(self, error: Exception) -> None:
        if self._llm.errored:
            raise VllmEnded(f"vLLM has ended: {one_line(error)}") from error
