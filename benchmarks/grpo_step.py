"""One GRPO step (8 prompts x 8 completions, at most 20 new tokens): a job of a Rookery service against TRL.

Rookery's step is the time between two commits of a job with staleness 0: rollouts, rewards, forward, backward, AdamW,
commit to disk and database, publication to the worker. TRL's is its trainer's step, at each of ``--micro-batches``; it
is judged by its best one. Same questions, same reward, rank 16 on every linear layer. First steps are left out."""

from __future__ import annotations

import argparse
from itertools import pairwise

from contender import ContenderFailed
from harness import Result, command, ratio
from model import start_peer
from service import Liked, job, service
from workload import PROMPTS, questions

MICRO_BATCHES = (32, 16)
"""TRL's best two on two cores: steps of 26.9 and 24.4 s in one run on the tables' processor, and with 64, 32, 16 and 8
in one run on a processor twice as quick 22.9, 21.8, 23.3 and 23.2 s."""
LEAST, AIM = 4.5, 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="steps after the first (default: 3)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES, help="TRL's")
    given = parser.parse_args()
    steps = given.repeats + 1
    result = Result("grpo_step", "One GRPO step: 8 prompts x 8 completions, at most 20 new tokens", command())
    ours: dict[int, list[float]] = {0: [], 2: []}
    with service() as bench:
        for staleness, values in ours.items():
            spec = job(f"step-{staleness}", steps, staleness=staleness)
            environment = Liked(questions(PROMPTS * steps))
            times = [row.time for row in bench.client.train(environment=environment, **spec).metrics()]
            values += [b - a for a, b in pairwise(times)]
    mine = result.add("Rookery, staleness 0", ours[0], "s")
    result.add("Rookery, staleness 2", ours[2], "s", "rollouts go on while the step trains")
    rivals = []
    try:
        for micro_batch in given.micro_batches:
            peer = start_peer("trl", "trl", "trl_step.py")
            result.versions.update({name: peer.about[name] for name in ("trl", "transformers")})
            seconds = peer.run(steps=steps, micro_batch=micro_batch)["seconds"]
            rivals.append(result.add(f"TRL GRPOTrainer, micro-batch {micro_batch}", seconds, "s"))
            peer.close()
    except ContenderFailed as error:
        result.notes.append(f"TRL did not run: {error}")
    target = f"a step >= {LEAST} x faster than TRL at its best (aim {AIM:g} x)"
    if rivals:
        faster = 1 / ratio(mine, min(rivals, key=lambda row: row.median))
        result.judge(target, f"{faster:.2f} x", faster >= LEAST)
    else:
        result.judge(target, "-", None, "the peer did not run")
    result.save()


if __name__ == "__main__":
    main()
