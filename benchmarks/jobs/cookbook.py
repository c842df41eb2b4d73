"""The cookbook's ``math_rl`` recipe with ``env=arithmetic``, unmodified, against a Rookery service on the real model.

Synchronously (importance sampling) and asynchronously (PPO, at most two steps off-policy): the model sees one worked
sum and is asked for another of two numbers up to 100; a right answer is worth 1, one that does not end as it should
costs 0.1. Measured is whether the reward rises: the mean of the last third of the steps less that of the first, against
twice its standard error.

    make cookbook, or python -m benchmarks.jobs.cookbook [--steps N] where its environment is there"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.lib.harness import HERE, MODEL, Result, command, peer_python
from benchmarks.lib.tinkering import tinkering

from rookery.settings import Settings
from rookery.worker.model.convert import prepare

MODES = {
    "sync": ["loss_fn=importance_sampling"],
    "async": ["loss_fn=ppo", "max_steps_off_policy=2"],
}
RECIPE = [
    "env=arithmetic", "lora_rank=16", "group_size=8", "groups_per_batch=8", "learning_rate=4e-4", "max_tokens=12",
    "eval_every=0", "save_every=0", "behavior_if_log_dir_exists=delete",
]  # fmt: skip
"""The learning rate is that at which jobs of this model learn sums; the recipe's own 1e-5 is for larger models and
batches of 100 groups. Twelve tokens hold an answer and the stop sequence behind it, which the recipe's five do not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    asked = parser.parse_args()
    python = peer_python("cookbook")
    if python is None:
        raise SystemExit("the cookbook's environment is missing: make cookbook")
    result = Result("cookbook", "The Tinker cookbook's math_rl env=arithmetic, unmodified", command())
    asking = "import importlib.metadata as m; print(m.version('tinker-cookbook'))"
    result.versions["tinker-cookbook"] = subprocess.check_output([str(python), "-c", asking], text=True).strip()
    tokenizer = prepare(MODEL, Settings.load().cache)
    for mode, more in MODES.items():
        with tinkering() as service, tempfile.TemporaryDirectory() as folder:
            environment = {
                **os.environ, "TINKER_API_KEY": service.key, "TINKER_BASE_URL": f"{service.url}/tinker",
                "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            script = [str(python), str(HERE / "peers" / "cookbook_math_rl.py"), MODEL, str(tokenizer)]
            where = [f"log_path={folder}/run", f"base_url={service.url}/tinker", f"max_steps={asked.steps}"]
            done = subprocess.run(
                [*script, *RECIPE, *more, *where], env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{mode}: {done.stderr.strip()[-2000:]}")
            lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        judge(result, mode, [json.loads(line) for line in lines])
    result.save()


def judge(result: Result, mode: str, steps: list[dict[str, float]]) -> None:
    rewards = [step["env/all/reward/total"] for step in steps if "env/all/reward/total" in step]
    right = [step["env/all/correct"] for step in steps if "env/all/correct" in step]
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    for name, values, correct in (("first", first, right[:third]), ("last", last, right[-third:])):
        note = f"mean {statistics.mean(values):.3f}; {100 * statistics.mean(correct):.0f}% right"
        result.add(f"{mode}: reward of the {name} {third} of {len(rewards)} steps", values, "", note)
    seconds = [step["time/total"] for step in steps if "time/total" in step]
    result.add(f"{mode}: a step", seconds, "s", "64 episodes")
    rise = statistics.mean(last) - statistics.mean(first)
    noise = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    said = f"{rise:+.3f}, standard error {noise:.3f}"
    result.judge(f"{mode}: the reward rises by more than twice its standard error", said, rise > 2 * noise)
    result.data[mode] = {"reward": rewards, "correct": right}


if __name__ == "__main__":
    main()
