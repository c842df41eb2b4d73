"""PEFT on transformers as a contender in training: forward, backward, AdamW on one LoRA adapter.

python peft_training.py MODEL TYPE [TARGET …]: without targets, every linear layer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import peft
import torch
import transformers
from benchmarks.lib.child import serve
from benchmarks.lib.workload import random_ids

if __name__ == "__main__":
    base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
    targets = sys.argv[3:] or "all-linear"
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    vocabulary = base.config.vocab_size
    # PEFT keeps adapters in float32; under autocast, as transformers' trainer runs it, they are multiplied in bfloat16
    bfloat16 = sys.argv[2] == "bfloat16"

    def run(sequences: int, length: int, micro_batch: int) -> dict[str, Any]:
        rows = torch.tensor(random_ids(sequences, length, vocabulary))
        began = time.perf_counter()
        for part in rows.split(micro_batch):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
                loss = model(input_ids=part, labels=part).loss
            (loss * len(part) / sequences).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"tokens": sequences * length, "seconds": time.perf_counter() - began}

    about = {"peft": peft.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    serve({**about, "threads": torch.get_num_threads()}, run)
