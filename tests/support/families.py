"""Small random models of several families of transformers, in float32."""

from __future__ import annotations

from collections.abc import Mapping

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
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
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
    "deepseek_v3",
    "gemma4_text",
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
        "deepseek_v3": LATENT
        | MOE
        | {"n_routed_experts": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "gemma4_text": {
            "num_hidden_layers": 4,  # the last two attend to the keys and values of the first two
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 6,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": SIZES["vocab_size"],
            "hidden_size_per_layer_input": 8,
        },
        "qwen3_5_moe_text": LINEAR | MOE | {"num_experts": 6, "shared_expert_intermediate_size": 24},
    }
    sizes = dict(SIZES)
    if family == "deepseek_v3":
        del sizes["head_dim"]  # the sum of others
    return transformers.AutoConfig.for_model(family, **(sizes | given.get(family, {})))


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


TRIED = (
    "apertus arcee aria_text axk2 bitnet bloom cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3"
    " ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo gemma gemma2 gemma3_text gemma4_text glm"
    " glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neo gpt_neox gpt_oss granite granitemoe granitemoeshared"
    " hunyuan_v1_dense hunyuan_v1_moe internlm3 jais2 lfm2 llama mellum minicpm3 minimax_m2 ministral"
    " ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi"
    " phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next"
    " seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu"
).split()
"""Families whose small models generate and train here as transformers and PEFT compute them. docs/operations.md lists
the same ones."""

_MORE_SIZES: dict[str, object] = {
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 1,
    "n_routed_experts": 6,
    "num_experts": 6,
    "num_local_experts": 6,
    "shared_expert_intermediate_size": 24,
    "vocab_size_per_layer_input": SIZES["vocab_size"],
    "hidden_size_per_layer_input": 8,
}


def tiny_config(family: str) -> transformers.PreTrainedConfig:
    """A configuration of any family, with the sizes that it has fields for."""
    fields = transformers.AutoConfig.for_model(family).to_dict()
    sizes = SIZES | MOE | LINEAR | _MORE_SIZES
    if "kv_lora_rank" in fields:
        sizes |= LATENT
        del sizes["head_dim"]
    fitting = {name: size for name, size in sizes.items() if name in fields or name == "pad_token_id"}
    return transformers.AutoConfig.for_model(family, **fitting)


def flat_lora(found: Mapping[str, torch.Tensor], layers: int) -> torch.Tensor:
    """PEFT's values by parameter of a Llama-like model, in the order of a policy's flat vector."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return torch.cat(
        [
            found[name].flatten()
            for side in "AB"
            for layer in range(layers)
            for module in modules
            for name in found
            if f"layers.{layer}." in name and f".{module}.lora_{side}." in name
        ]
    )
