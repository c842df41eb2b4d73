"""From the published weight names to the fused ones that the decoder maps.

Promise: fusing only concatenates; no number changes. A missing or an unexpected weight is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rookery.errors import UserError
from rookery.worker.model.config import DecoderConfig

_IGNORED = ("rotary_emb.inv_freq",)  # a buffer that old checkpoints carry; computed from the config here


def fuse(config: DecoderConfig, published: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """State dict of a ``…ForCausalLM`` → the fused names that ``Decoder`` reads. Raises ``UserError``."""
    left = {name: tensor for name, tensor in published.items() if not name.endswith(_IGNORED)}

    def take(*names: str) -> Tensor:
        missing = [name for name in names if name not in left]
        if missing:
            raise UserError(f"the model's weights lack {missing[0]}")
        parts = [left.pop(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    fused = {"embed": take("model.embed_tokens.weight"), "norm": take("model.norm.weight")}
    if config.tied:
        left.pop("lm_head.weight", None)
    else:
        fused["head"] = take("lm_head.weight")
    for i in range(config.layers):
        source, target = f"model.layers.{i}.", f"layers.{i}."
        attention, mlp = source + "self_attn.", source + "mlp."
        fused[target + "attention_norm"] = take(source + "input_layernorm.weight")
        fused[target + "mlp_norm"] = take(source + "post_attention_layernorm.weight")
        if config.qk_norm:
            fused[target + "q_norm"] = take(attention + "q_norm.weight")
            fused[target + "k_norm"] = take(attention + "k_norm.weight")
        for site, parts, biased in (
            ("qkv", [attention + f"{p}_proj" for p in "qkv"], config.qkv_bias),
            ("o", [attention + "o_proj"], config.o_bias),
            ("gate_up", [mlp + "gate_proj", mlp + "up_proj"], config.mlp_bias),
            ("down", [mlp + "down_proj"], config.mlp_bias),
        ):
            fused[target + site] = take(*(part + ".weight" for part in parts))
            if biased:
                fused[target + site + "_bias"] = take(*(part + ".bias" for part in parts))
    if left:
        raise UserError(f"the model has a weight that its config does not explain: {next(iter(left))}")
    return {name: tensor.contiguous() for name, tensor in fused.items()}
