"""transformers and PEFT on a GPU, on the same shapes and the same work as Rookery in ``gpu.py``. Both are imported when
they are wanted: whoever measures may have neither."""

from __future__ import annotations

import time
from collections.abc import Callable
from inspect import signature
from itertools import count
from typing import Any

import torch
from benchmarks.lib.orders import await_device
from benchmarks.micro.gpu_models import norm_scale

MICRO_BATCHES = (4, 8, 16)
"""Sequences of 1,024 tokens that go forward and back together, each measured: the float32 logits of four alone are 2.5
GB."""


def base(raw: dict[str, Any], device: torch.device) -> Any:
    """transformers' model of the shape with random weights, made on the device; logits spread as in ``gpu_models``."""
    import transformers

    config = transformers.AutoConfig.for_model(**raw)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    torch.nn.init.constant_(model.model.norm.weight, norm_scale(raw["hidden_size"]))
    return model.eval()


def generator(model: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], tuple[int, float]]:
    """``generate`` on one batch: tokens and seconds."""
    ids = torch.tensor(prompts, device=model.device)

    def run() -> tuple[int, float]:
        began = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
        )  # fmt: skip
        await_device()
        return out.numel() - ids.numel(), time.perf_counter() - began

    return run


def batcher(model: Any, prompts: list[list[int]], new_tokens: int) -> Callable[[], tuple[int, float]]:
    """Continuous batching: tokens and seconds. What it records is kept from run to run where this release can do so,
    and no run has the last one's prompts. Raises ``AttributeError`` where this release has none."""
    import transformers

    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    batch = model.generate_batch
    kept = {"persistent_manager": True} if "persistent_manager" in signature(batch).parameters else {}
    runs = count(1)

    def run() -> tuple[int, float]:
        first, began = next(runs), time.perf_counter()
        out = batch(inputs=[[first, *prompt[1:]] for prompt in prompts], generation_config=config, **kept)
        await_device()
        tokens = sum(len(answer.generated_tokens) for answer in out.values())
        if tokens != len(prompts) * new_tokens:
            raise RuntimeError(f"{tokens} tokens came, not {len(prompts) * new_tokens}")
        return tokens, time.perf_counter() - began

    return run


def tuner(model: Any, rows: list[list[int]], rank: int, micro_batch: int) -> Callable[[], tuple[int, float]]:
    """A step of PEFT: forward, backward, AdamW on one adapter: tokens and seconds. The model is PEFT's from now on."""
    import peft

    tuned = peft.get_peft_model(
        model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    tuned.train()
    weights = [weight for weight in tuned.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    ids = torch.tensor(rows, device=model.device)

    def run() -> tuple[int, float]:
        began = time.perf_counter()
        for part in ids.split(micro_batch):
            with torch.autocast(ids.device.type, dtype=torch.bfloat16):  # else PEFT multiplies its adapters in float32
                loss = tuned(input_ids=part, labels=part).loss
            (loss * len(part) / len(ids)).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        await_device()
        return ids.numel(), time.perf_counter() - began

    return run
