"""Training of families that the native decoder does not know: the transformers trainer against PEFT.

``python -m benchmarks.micro.other_families``. A step is forward, backward and AdamW on rank 16, 8 x 128 tokens, loss on
every token. Three models: the native family that everything else is measured on, where the native trainer stands
beside; a mixture of experts; a hybrid of linear and full attention. The last two have random weights: how long a step
takes does not depend on them, but for the experts that the tokens choose, which are the same for both contenders. Both
adapt the same linear modules. Each contender has a process; they take turns, after an uncounted step each. PEFT gets
the micro-batch that is fastest for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, WORK, Result, command, options, ratio, whole
from benchmarks.lib.model import number_type, published

SEQUENCES, LENGTH = 8, 128
MICRO_BATCHES = (8, 4, 2)
LEAST = 1.0
NATIVE = "Llama (native)"
SIZES = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
"""Some 100 million parameters, as of the native model."""
RANDOM: dict[str, tuple[str, dict[str, int]]] = {
    "mixture of experts (Qwen3-MoE, 2 of 8)": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "intermediate_size": 1024},
    ),
    "hybrid (Qwen3.5, 3 of 4 layers linear attention)": (
        "qwen3_5_text",
        {
            "intermediate_size": 1536,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 8,
        },
    ),
}
"""Models by name: their family in transformers, and what it needs beside :data:`SIZES`."""


def main() -> None:
    times = options(__doc__, "the same").parse_args().repeats
    result = Result(
        "other_families",
        f"The transformers trainer on three families, rank 16, {number_type()}, 8 x 128 tokens",
        command(),
    )
    compare(result, NATIVE, published(), times)
    for name, (family, sizes) in RANDOM.items():
        compare(result, name, random_model(family, sizes), times)
    result.save()


def random_model(family: str, sizes: dict[str, int]) -> Path:
    """A folder in the published layout."""
    folder = WORK / f"random-{family}"
    if not (folder / "config.json").exists():
        import torch
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **SIZES, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with whole(folder) as made:
            model.save_pretrained(made)
    return folder


def compare(result: Result, name: str, folder: Path, times: int) -> None:
    """Tokens per second of each contender on one model, and the ratio."""
    trainer = Contender(
        "transformers", [sys.executable, "-m", "benchmarks.micro.other_families", "--child", str(folder)]
    )
    modules = trainer.about["targets"]
    peft_command = [sys.executable, str(HERE / "peers" / "peft_training.py"), str(folder), number_type(), *modules]
    contenders = {"transformers trainer": trainer, "PEFT": Contender("peft", peft_command)}
    if name == NATIVE:
        contenders["native trainer"] = Contender("native", [sys.executable, str(HERE / "lib" / "contender_trainer.py")])
    about = contenders["PEFT"].about
    result.versions.update({package: about[package] for package in ("peft", "transformers")})
    speeds: dict[str, list[float]] = {}
    for turn in range(times + 1):  # the first warms up
        answers = {"transformers trainer": trainer.run()}
        if name == NATIVE:
            answers["native trainer"] = contenders["native trainer"].run(shapes=[[LENGTH] * SEQUENCES])
        for size in MICRO_BATCHES:
            asked = {"sequences": SEQUENCES, "length": LENGTH, "micro_batch": size}
            answers[f"PEFT, micro-batch {size}"] = contenders["PEFT"].run(**asked)
        for contender, answer in answers.items() if turn else ():
            speeds.setdefault(contender, []).append(answer["tokens"] / answer["seconds"])
    rows = {contender: result.add(f"{name}: {contender}", values, "tokens/s") for contender, values in speeds.items()}
    best = max((row for contender, row in rows.items() if contender.startswith("PEFT")), key=lambda row: row.median)
    faster = ratio(rows["transformers trainer"], best)
    result.judge(f"{name}: the transformers trainer >= {LEAST} x PEFT at its best", f"{faster:.2f} x", faster >= LEAST)
    for process in contenders.values():
        process.close()


def child(folder: Path) -> None:
    """The transformers trainer as a contender; it tells which linear modules its adapters change."""
    from benchmarks.lib.child import serve
    from benchmarks.lib.orders import RANK, load_policies, optimizer_steps, unit
    from benchmarks.lib.workload import random_ids

    from rookery import protocol
    from rookery.settings import Settings
    from rookery.worker.model.adapter import MODULES
    from rookery.worker.model.transformers_model import TransformersModel
    from rookery.worker.trainer.hf.trainer import TransformersBackbone
    from rookery.worker.trainer.packed_trainer import PackedTrainer

    model = TransformersModel.load(folder)
    targets = sorted({MODULES.get(part, part).rpartition(".")[2] for _, part in model.projections.shapes})
    slice_tokens = Settings.load().training.slice_tokens
    trainer = PackedTrainer(TransformersBackbone(model), max_rank=RANK, slice_tokens=slice_tokens)
    load_policies(trainer, 1)
    rows = random_ids(SEQUENCES, LENGTH, model.vocab)
    batch = protocol.TrainingBatch(groups=[unit(row) for row in rows])
    taken = iter(range(sys.maxsize))

    def run() -> dict[str, Any]:
        seconds = optimizer_steps(trainer, [batch], protocol.Loss(name="cross_entropy"), next(taken))
        return {"tokens": SEQUENCES * LENGTH, "seconds": seconds}

    serve({"targets": targets}, run)


if __name__ == "__main__":
    child(Path(sys.argv[2])) if sys.argv[1:2] == ["--child"] else main()
