"""How far the log-probabilities that sampling records are from those that training computes for the same tokens.

Through the Tinker API, as its clients see them: texts are sampled at temperature 1 from an untrained adapter and from
one that was trained far enough to differ, and scored by ``forward`` on the same weights. Both sides are bfloat16; the
texts are the engine's own, so minus the mean difference is an estimate of KL(sampling || training)."""

from __future__ import annotations

import logging
import os
import sys

import numpy as np
import tinker
from benchmarks.lib.harness import MODEL, Result, command, repeats
from benchmarks.lib.model import chat_ids
from benchmarks.lib.tinkering import datum, tinkering
from benchmarks.lib.workload import questions
from tinker import types

TEXTS, TOKENS = 48, 64
MEAN, MOST = 0.06, 0.75
"""Tolerances in nats, as docs/serving.md states them: of the mean difference, and of any single token's."""

STEPS, RATE = 4, 1e-3
"""Steps of supervised training on other texts: the adapter's share of the logits is then no longer small."""


def differences(training: tinker.TrainingClient, prompts: list[list[int]], seed: int) -> np.ndarray:
    """Training's log-probabilities less those of sampling, one per sampled token."""
    sampler = training.save_weights_and_get_sampling_client().result()
    asked = [
        sampler.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=TOKENS, seed=seed + i))
        for i, prompt in enumerate(prompts)
    ]
    texts = [future.result().sequences[0] for future in asked]
    data = [datum(prompt, text.tokens) for prompt, text in zip(prompts, texts, strict=True)]
    scored = training.forward(data, "cross_entropy").result().loss_fn_outputs
    gaps = [
        np.array(found["logprobs"].data)[len(prompt) - 1 :] - np.array(text.logprobs)
        for prompt, text, found in zip(prompts, texts, scored, strict=True)
    ]
    return np.concatenate(gaps)


def main() -> None:
    logging.getLogger("tinker").setLevel(logging.ERROR)  # it tells of every question that was answered "not yet"
    times = repeats(__doc__)
    result = Result("logprob_agreement", "Log-probabilities of sampling and of training", command())
    prompts = chat_ids(questions(TEXTS))
    with tinkering() as service:
        visitor = tinker.ServiceClient(base_url=f"{service.url}/tinker", api_key=service.key)
        training = visitor.create_lora_training_client(MODEL, rank=16, seed=1).result()
        for name in ("untrained adapter", "trained adapter"):
            if name == "trained adapter":
                for step in range(STEPS):
                    part = prompts[step::STEPS]
                    data = [datum(mine[:4], mine[4:], 1.0 / TEXTS) for mine in part]
                    training.forward_backward(data, "cross_entropy").result()
                    training.optim_step(types.AdamParams(learning_rate=RATE)).result()
            runs = [differences(training, prompts, 1000 * turn) for turn in range(times)]
            count = sum(map(len, runs))
            mean = result.add(f"{name}: mean |d|", [np.abs(run).mean() for run in runs], "nats", f"{count:,} tokens")
            most = result.add(f"{name}: max |d|", [np.abs(run).max() for run in runs], "nats")
            result.add(f"{name}: mean d", [run.mean() for run in runs], "nats", "minus this estimates the KL")
            result.add(
                f"{name}: KL(sampling || training)", [np.mean(np.expm1(run) - run) for run in runs], "nats",
                "exp(d) - 1 - d: never negative, of small variance",
            )  # fmt: skip
            target = f"{name}: mean |d| < {MEAN}, max |d| < {MOST} over at least 2,000 tokens"
            met = mean.median < MEAN and max(most.values) < MOST and count >= 2000
            result.judge(target, f"{mean.median:.4f}, {max(most.values):.3f} over {count:,}", met)
    result.save()
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads would go on


if __name__ == "__main__":
    main()
