"""TRL's GRPOTrainer as a contender: steps of 8 prompts x 8 completions with LoRA on the CPU.

python trl_step.py MODEL TYPE
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import peft
import torch
import transformers
import trl
from benchmarks.lib.child import serve
from benchmarks.lib.workload import COMPLETIONS, PROMPTS, REPLY_TOKENS, questions, reward, stories
from datasets import Dataset

TEXTS = {"questions": questions, "stories": stories}


class Clock(transformers.TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        self.ends.append(time.perf_counter())


def judge(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward(tokens) for tokens in completion_ids]


if __name__ == "__main__":
    folder, number_type = sys.argv[1:]

    def run(steps: int, micro_batch: int, texts: str = "questions") -> dict[str, Any]:
        """``seconds`` between the ends of two steps; of the ``whole`` training, the model's loading left out."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, number_type))
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in TEXTS[texts](PROMPTS * steps)]
        total = PROMPTS * COMPLETIONS
        clock = Clock()
        with tempfile.TemporaryDirectory() as out:
            settings = trl.GRPOConfig(
                output_dir=out, use_cpu=True, bf16=number_type == "bfloat16", gradient_checkpointing=False,
                report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=steps,
                learning_rate=1e-4,
                per_device_train_batch_size=micro_batch, gradient_accumulation_steps=total // micro_batch,
                num_generations=COMPLETIONS, max_completion_length=REPLY_TOKENS, temperature=1.0, beta=0.0,
            )  # fmt: skip
            trainer = trl.GRPOTrainer(
                model=model,
                reward_funcs=judge,
                args=settings,
                train_dataset=Dataset.from_list(rows),
                processing_class=transformers.AutoTokenizer.from_pretrained(folder),
                peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
                callbacks=[clock],
            )
            began = time.perf_counter()
            trainer.train()
            whole = time.perf_counter() - began
        return {"seconds": [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)], "whole": whole}

    serve({"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}, run)
