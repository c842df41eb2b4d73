"""Small random models of several families of transformers, in float32."""

from __future__ import annotations

import torch
import transformers

SIZES = {
    "vocab_size": 173,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "num_hidden_layers": 4,  # three of linear attention, one of full
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES = (
    "llama",
    "qwen3",
    "smollm3",
    "gemma2",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)


def small_config(family: str) -> transformers.PreTrainedConfig:
    """A new configuration: a model changes its own. Windows are shorter than the tests' texts."""
    given: dict[str, dict[str, object]] = {
        "smollm3": {"use_sliding_window": True, "sliding_window": 6},
        "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 16},
        "qwen3_moe": MOE | {"num_experts": 6},
        "gemma3_text": {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6},
        "qwen3_5_text": LINEAR,
        "qwen3_5_moe_text": LINEAR | MOE | {"num_experts": 6, "shared_expert_intermediate_size": 24},
    }
    return transformers.AutoConfig.for_model(family, **(SIZES | given.get(family, {})))


def small_model(family: str, config: transformers.PreTrainedConfig | None = None) -> transformers.PreTrainedModel:
    """Equal weights on each call; larger than the usual start, so that attention and softmax are far from uniform."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config or small_config(family), dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "conv1d" not in name:
            torch.nn.init.normal_(weight, 0.0, 0.15)
        elif name.endswith(("sinks", "bias")):
            torch.nn.init.normal_(weight, 0.0, 0.5)
    return model
