"""Training of families that the native decoder does not know: the transformers trainer against PEFT and the native one.

A step is forward, backward and AdamW on rank 16 of the same model, 8 x 128 tokens, loss on every token. Each contender
has a process; they take turns, after an uncounted step each. PEFT gets the micro-batch that is fastest for it."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, Result, command, options, ratio
from benchmarks.lib.model import number_type, ours, published

SEQUENCES, LENGTH = 8, 128
MICRO_BATCHES = (8, 4, 2)
LEAST = 1.0


def main() -> None:
    times = options(__doc__, "the same").parse_args().repeats
    result = Result(
        "other_families",
        f"The transformers trainer on a native family (Llama), rank 16, {number_type()}, 8 x 128 tokens",
        command(),
    )
    python = sys.executable
    trainer = Contender("transformers", [python, "-m", "benchmarks.micro.other_families", "--child"])
    native = Contender("native", [python, str(HERE / "lib" / "contender_trainer.py")])
    peft = Contender("peft", [python, str(HERE / "peers" / "peft_training.py"), str(published()), number_type()])
    result.versions.update({name: peft.about[name] for name in ("peft", "transformers")})
    speeds: dict[str, list[float]] = {}
    for turn in range(times + 1):  # the first warms up
        answers = {"transformers trainer": trainer.run(), "native trainer": native.run(shapes=[[LENGTH] * SEQUENCES])}
        for size in MICRO_BATCHES:
            answers[f"PEFT, micro-batch {size}"] = peft.run(sequences=SEQUENCES, length=LENGTH, micro_batch=size)
        for name, answer in answers.items() if turn else ():
            speeds.setdefault(name, []).append(answer["tokens"] / answer["seconds"])
    rows = {name: result.add(name, values, "tokens/s") for name, values in speeds.items()}
    best = max((row for name, row in rows.items() if name.startswith("PEFT")), key=lambda row: row.median)
    faster = ratio(rows["transformers trainer"], best)
    result.judge(f"the transformers trainer >= {LEAST} x PEFT at its best", f"{faster:.2f} x", faster >= LEAST)
    for contender in (trainer, native, peft):
        contender.close()
    result.save()


def child() -> None:
    """The transformers trainer as a contender."""
    from benchmarks.lib.child import serve
    from benchmarks.lib.orders import RANK, load_policies, optimizer_steps, unit
    from benchmarks.lib.workload import random_ids

    from rookery import protocol
    from rookery.settings import Settings
    from rookery.worker.model.transformers_model import TransformersModel
    from rookery.worker.trainer.hf.trainer import TransformersBackbone
    from rookery.worker.trainer.packed_trainer import PackedTrainer

    model = TransformersModel.load(ours())
    slice_tokens = Settings.load().training.slice_tokens
    trainer = PackedTrainer(TransformersBackbone(model), max_rank=RANK, slice_tokens=slice_tokens)
    load_policies(trainer, 1)
    rows = random_ids(SEQUENCES, LENGTH, model.vocab)
    batch = protocol.TrainingBatch(groups=[unit(row) for row in rows])
    taken = iter(range(sys.maxsize))

    def run() -> dict[str, Any]:
        seconds = optimizer_steps(trainer, [batch], protocol.Loss(name="cross_entropy"), next(taken))
        return {"tokens": SEQUENCES * LENGTH, "seconds": seconds}

    serve({}, run)


if __name__ == "__main__":
    child() if "--child" in sys.argv else main()
