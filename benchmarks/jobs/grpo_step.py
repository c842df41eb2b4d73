"""One GRPO step (8 prompts x 8 completions, at most 20 new tokens): a job of a Rookery service against TRL.

Rookery's step is the time between two commits of a job with staleness 0: rollouts, rewards, forward, backward, AdamW,
commit to disk and database, publication to the worker. TRL's is its trainer's step, at each of ``--micro-batches``; it
is judged by its best one. Same questions, same reward, rank 16 on every linear layer. First steps are left out."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.lib import bars
from benchmarks.lib.contender import ContenderFailed
from benchmarks.lib.harness import Result, command, options
from benchmarks.lib.model import start_peer
from benchmarks.lib.service import Liked, job, service
from benchmarks.lib.workload import PROMPTS, questions

MICRO_BATCHES = (32, 16)
"""TRL's best two on two cores: steps of 26.9 and 24.4 s in one run on the tables' processor, and with 64, 32, 16 and 8
in one run on a processor twice as quick 22.9, 21.8, 23.3 and 23.2 s."""
QUICK_MICRO_BATCHES = (16,)
"""Its best on the slower of the two."""
AHEAD = "rollouts go on while the step trains"
STALENESS = {0: "", 1: AHEAD, 2: AHEAD}
"""With what is said of it."""
QUICK_STALENESS = (0,)


def main() -> None:
    parser = options(__doc__, "staleness 0 and one micro-batch only")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="TRL's (default: its best two; with --quick one)")
    given = parser.parse_args()
    micro_batches = given.micro_batches or (QUICK_MICRO_BATCHES if given.quick else MICRO_BATCHES)
    steps = given.repeats + 1
    result = Result("grpo_step", "One GRPO step: 8 prompts x 8 completions, at most 20 new tokens", command())
    ours: dict[int, list[float]] = {staleness: [] for staleness in (QUICK_STALENESS if given.quick else STALENESS)}
    with service() as bench:
        for staleness, values in ours.items():
            spec = job(f"step-{staleness}", steps, staleness=staleness)
            environment = Liked(questions(PROMPTS * steps))
            times = [row.time for row in bench.client.train(environment=environment, **spec).metrics()]
            values += [b - a for a, b in pairwise(times)]
    for staleness, values in ours.items():
        result.add(f"Rookery, staleness {staleness}", values, "s", STALENESS[staleness])
    try:
        for micro_batch in micro_batches:
            peer = start_peer("trl", "trl", "trl_step.py")
            result.versions.update({name: peer.about[name] for name in ("trl", "transformers")})
            seconds = peer.run(steps=steps, micro_batch=micro_batch)["seconds"]
            result.add(f"TRL GRPOTrainer, micro-batch {micro_batch}", seconds, "s")
            peer.close()
    except ContenderFailed as error:
        result.notes.append(f"TRL did not run: {error}")
    result.judge_rows(bars.grpo_step)
    result.save()


if __name__ == "__main__":
    main()
