"""Supervised fine-tuning as a job, against the trainer of reinforcement learning on sequences of the same lengths.

The job's speed is tokens of its rows by the time between two commits: batches, forward, backward, AdamW, commit to disk
and database. The trainer's is a step alone, in a process of its own: forward, backward with the loss ``aipo``, AdamW,
as many tokens in a pass. Both train rank 16 on every linear layer. First steps are left out."""

from __future__ import annotations

import sys
from itertools import pairwise

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, MODEL, Result, command, options, ratio
from benchmarks.lib.service import completed, service
from benchmarks.lib.workload import questions

from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.tokenization.demonstrations import learned_sequences
from rookery.tokenization.registry import model_folder

ROWS = 32
"""Of one step: some five thousand tokens."""
WORDS = 45
"""Of each reply: sequences of 148 tokens."""
WARM = 1
LEAST = 0.95


def main() -> None:
    given = options(__doc__, "two counted steps").parse_args()
    steps = 2 if given.quick else given.repeats
    result = Result("fine_tuning", f"Supervised fine-tuning as a job, {ROWS} rows in a step, rank 16", command())
    reply = " ".join(f"word{number % 10}" for number in range(WORDS))
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}
        for question in questions(ROWS)
    ]
    spec = {
        "name": "sft", "base_model": MODEL, "environment": {"id": "demonstrations", "rows": rows},
        "policies": {"main": {"rank": 16}}, "algorithm": {"name": "sft", "batch_size": ROWS},
        "stop": {"steps": steps + WARM + 1},
    }  # fmt: skip
    with service() as bench:
        made = bench.client.submit(spec)
        completed(made)
        found = list(made.metrics(follow=False))[WARM:]
    tokens = found[0].length_mean * ROWS
    speeds = [tokens / (after.time - before.time) for before, after in pairwise(found)]
    chat = Chat.load(model_folder(Settings.load({}).cache, MODEL))
    sequences = [learned_sequences(chat, row["messages"], [0.0, 1.0])[0] for row in rows]
    prompt = round(sum(len(one.prompt) for one in sequences) / ROWS)
    length = round(tokens / ROWS)
    units = max(1, Settings.load({}).training.slice_tokens // length)
    trainer = Contender("trainer", [sys.executable, str(HERE / "lib" / "contender_trainer.py")])
    alone = []
    for turn in range(steps + 1):  # the first warms up
        seconds = trainer.run(what="groups", groups=ROWS, prompt=prompt, members=1, reply=length - prompt, units=units)[
            "seconds"
        ]
        if turn:
            alone.append(ROWS * length / seconds)
    trainer.close()
    job = result.add(f"SFT job, sequences of {length} tokens", speeds, "tokens/s", "commits included")
    rival = result.add(f"trainer alone with aipo, prompts of {prompt} tokens", alone, "tokens/s")
    share = ratio(job, rival)
    result.judge(f"an SFT job >= {LEAST:.0%} of the RL trainer's tokens/s", f"{share:.0%}", share >= LEAST)
    result.save()


if __name__ == "__main__":
    main()
