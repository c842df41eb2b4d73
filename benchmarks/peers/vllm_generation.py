"""vLLM's CPU build as a contender in generation, offline engine; eager or compiled, with LoRA or without.

python vllm_generation.py MODEL TYPE (eager | compiled) ADAPTER …
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from benchmarks.lib.child import serve
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    model, number_type, mode, *folders = sys.argv[1:]
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": 16} if folders else {}
    engine = vllm.LLM(
        model=model, dtype=number_type, enforce_eager=mode == "eager", max_model_len=512, max_num_seqs=64,
        seed=0, enable_prefix_caching=False, **lora,
    )  # fmt: skip
    requests = [LoRARequest(f"adapter-{i}", i + 1, folder) for i, folder in enumerate(folders)]

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        sequences = len(prompts)
        sampling = [
            vllm.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=i) for i in range(sequences)
        ]
        chosen = [requests[i % len(requests)] for i in range(sequences)] if requests else None
        began = time.perf_counter()
        outputs = engine.generate(inputs, sampling, lora_request=chosen, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"tokens": sum(len(output.outputs[0].token_ids) for output in outputs), "seconds": seconds}

    import torch

    serve({"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}, run)
