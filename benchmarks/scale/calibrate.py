"""A profile of this machine for ``rookery simulate``: the shipped engine and trainer, timed at the sizes it asks for.

Decode steps at several batch sizes, prefill, training (from two sizes, so that the optimizer step comes apart from the
tokens), bytes of a version, time to load the model. The network and the workload are taken from the packaged profile of
a two-core machine, and marked as such: edit them. Run it on a machine that does nothing else."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.lib.contender_engine import Engine
from benchmarks.lib.contender_trainer import Training
from benchmarks.lib.harness import MODEL, machine
from benchmarks.lib.model import adapters
from benchmarks.lib.orders import RANK
from benchmarks.lib.workload import random_ids

from rookery.settings import Settings
from rookery.simulation.profiles import load_profile
from rookery.worker.engine.native.engine import PREFILL_TOKENS
from rookery.worker.model.adapter import read_adapter

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, REPLY = 48, 48
SEQUENCE = 256
"""Tokens of a sequence that is trained on."""
SEQUENCES = (4, 16)
"""The two sizes of a batch: the difference is tokens, what is left the optimizer."""
LIKE = "two-core-cpu-135m"
"""Where the network's and the workload's figures come from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--name", required=True, help="what the profile is to be called")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement; the median counts (default: 3)")
    parser.add_argument("--adapters", type=int, default=1, choices=range(1, 5), help="in a batch (default: 1)")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    given = parser.parse_args()
    began = time.perf_counter()
    engine = Engine()
    load = time.perf_counter() - began
    vocabulary = engine.decoder.config.vocab
    decode, prefill = [], []
    for rows in ROWS:
        prompts = random_ids(rows, PROMPT, vocabulary)
        runs = [engine.run(prompts, given.adapters, REPLY) for _ in range(given.repeats + 1)][1:]  # the first warms up
        decode.append((rows, _median(runs, "step_seconds")))
        prefill.append(_median(runs, "prefill_seconds") / (rows * PROMPT))
        print(f"  {rows} rows: {1000 * decode[-1][1]:.1f} ms a step, {1 / prefill[-1]:.0f} prompt tokens/s", flush=True)
    trained = [_train(Training(), count, given.repeats) for count in SEQUENCES]
    token = (trained[1] - trained[0]) / ((SEQUENCES[1] - SEQUENCES[0]) * SEQUENCE)
    optimizer = max(0.0, trained[0] - token * SEQUENCES[0] * SEQUENCE)
    print(f"  training: {1 / token:.0f} tokens/s, optimizer step {optimizer:.2f} s", flush=True)
    folder = adapters(1)[0]
    numbers = sum(a.numel() + b.numel() for a, b in read_adapter(folder, engine.decoder.config).weights.values())
    like = load_profile(LIKE)
    network = {name: getattr(like.reserved, name) for name in ("download", "upload", "latency", "price", "context")}
    timed = f"benchmarks/scale/calibrate.py, medians of {given.repeats}"
    profile = {
        "name": given.name,
        "label": "measured",
        "sources": {
            "machine": f"{machine()}; torch {torch.__version__}, {torch.get_num_threads()} threads; {MODEL},"
            f" rank {RANK}",
            **dict.fromkeys(("decode", "prefill_token", "train_token", "optimizer", "load"), timed),
            "adapter_bytes": "the file of an adapter",
            "state_bytes": "two float32 moments per number of the adapter",
            "prefill_slice": "the engine's",
            **dict.fromkeys(("train_slice", "rows"), "the setting"),
            **dict.fromkeys(network, f"as in {LIKE}"),
            "workload": f"assumed, as in {LIKE}",
        },
        "reserved": {
            **network,
            "rows": Settings().engine.max_rows,
            "decode": decode,
            "prefill_token": prefill[-1],
            "prefill_slice": PREFILL_TOKENS,
            "train_token": token,
            "train_slice": Settings().training.slice_tokens,
            "optimizer": optimizer,
            "adapter_bytes": sum(path.stat().st_size for path in folder.iterdir()),
            "state_bytes": 2 * 4 * numbers,
            "load": load,
        },
        "workload": like.workload.model_dump(mode="json"),
    }
    given.out.write_text(json.dumps(profile, indent=1) + "\n")
    load_profile(str(given.out))
    print(f"wrote {given.out}: rookery simulate --profile {given.out}")


def _train(training: Training, count: int, repeats: int) -> float:
    """Seconds of one step on ``count`` sequences."""
    runs = [training.run([[SEQUENCE] * count]) for _ in range(repeats + 1)][1:]
    return _median(runs, "seconds")


def _median(runs: list[dict[str, Any]], what: str) -> float:
    return statistics.median(run[what] for run in runs)


if __name__ == "__main__":
    main()
