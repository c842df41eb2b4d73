"""The native sampler inside vLLM: a logits processor, and the extension of vLLM's worker that reports its
log-probabilities.

Promises:

* A request that carries a key (``SEED``, ``POSITION`` and ``TEMPERATURE`` in ``SamplingParams.extra_args``) is sampled
  by :func:`rookery.worker.engine.sampler.sample`: same logits, same seed and position, same token. Its
  ``temperature`` in vLLM is 0: greedy decoding takes the one token that is left. Other requests are not touched.
* With the extension, the log-probability of a sampled token is that of the distribution sampled from, at any
  temperature: vLLM reports the logit that the processor leaves, which is that number. Without it, vLLM reports the
  model's log-probability at temperature 1.

This module is imported by vLLM's own processes; a server takes it as ``--logits-processors
rookery.worker.engine.vllm.keyed_sampler:KeyedSampler``.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rookery.worker.engine.sampler import SamplingKey, sample
from rookery.worker.engine.vllm.backend import NOT_A_NUMBER, POSITION, SEED, TEMPERATURE


class KeyedSampler(LogitsProcessor):
    """A row is (seed, position of the first token, temperature, tokens sampled since)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, int, float, list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ``ValueError`` for a key that is incomplete or comes with another temperature."""
        given = sampling_params.extra_args or {}
        if SEED in given and (sampling_params.temperature or POSITION not in given or TEMPERATURE not in given):
            raise ValueError(f"{SEED} needs {POSITION}, {TEMPERATURE} and temperature 0")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """Leaves one token of each keyed row of ``logits`` [rows, vocab], with its log-probability."""
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        keys = []
        for row in rows:
            seed, position, temperature, output = self._rows[row]
            keys.append(SamplingKey(seed, position + len(output), temperature))
        at = torch.tensor(rows, device=logits.device)
        sampled = sample(logits[at], keys)
        values = [NOT_A_NUMBER if math.isnan(logprob) else logprob for logprob in sampled.logprobs]
        logits[at] = -torch.inf
        logits[at, torch.tensor(sampled.tokens, device=logits.device)] = logits.new_tensor(values)
        return logits


def _row(params: SamplingParams, _: list[int] | None, output: list[int]) -> tuple[int, int, float, list[int]] | None:
    given = params.extra_args or {}
    if SEED not in given:
        return None
    return int(given[SEED]), int(given[POSITION]), float(given[TEMPERATURE]), output


class WorkerExtension:
    """Methods that vLLM adds to its workers; ``AsyncLLM.collective_rpc`` calls them by name."""

    model_runner: Any

    def report_processed_logits(self) -> None:
        """Report the logit that the processors leave; scores of prompts stay log-probabilities."""
        self.model_runner.sampler.logprobs_mode = "processed_logits"

    def end_with(self, process: int) -> None:
        """End vLLM when ``process`` ends, however it does: nothing else would notice that it was killed."""
        ended = os.pidfd_open(process)

        def watch() -> None:
            select.select([ended], [], [])
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="parent", daemon=True).start()
