"""The sharded module: a causal LM of transformers, with a LoRA or with all parameters trained, under ``fully_shard``.

Promises:

* Trained weights, their gradients and moments are float32, and gradients are summed over the processes in float32. The
  compute dtype is that of the native trainer; a frozen base is stored in it.
* No process ever materialises the whole model: it is built on storage that nothing touches, and each process copies
  its shards of the mapped weights into its own.
* Names of weights are those of the published model, whatever wraps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from rookery.tokenization.registry import CONFIG
from rookery.worker.model.adapter import Adapter

LOGIT_ROWS = 256
"""Rows whose logits exist at once, forward and backward: 50 MB in float32 at 49,152 words, in three copies."""


class LoraLinear(nn.Module):
    """A frozen projection with a LoRA (arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        """``a`` [rank, in], ``b`` [out, rank]."""
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Parameter(a.float()), nn.Parameter(b.float())
        self.scale = scale
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + F.linear(F.linear(x, self.lora_a), self.lora_b * self.scale) if self.enabled else y


class PolicyModule(nn.Module):
    """Log-probabilities of given tokens under a causal LM."""

    def __init__(self, lm: Any) -> None:
        """``lm``: a ``…ForCausalLM``."""
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor, at: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """tokens [rows, length] int64, padded at the end; ``at`` [n, 2] int64, (row, position) of the tokens that
        predict ``targets`` [n] → log-probabilities [n] and entropies [n] in nats, float32, of the distribution at
        ``temperature``. Padding comes after every token of its row, so causal attention never reads it."""
        at, counts = at.unique_consecutive(dim=0, return_counts=True)  # a row may have several targets
        hidden = self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state[at[:, 0], at[:, 1]]
        chunks = counts.split(LOGIT_ROWS)
        chosen = targets.split([int(chunk.sum()) for chunk in chunks])
        parts = [
            checkpoint(self._score, *chunk, temperature, use_reentrant=False)
            for chunk in zip(hidden.split(LOGIT_ROWS), chunks, chosen, strict=True)
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _score(self, hidden: Tensor, counts: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """``counts`` [rows]: how many of the ``targets`` each row has."""
        logits = self.lm.get_output_embeddings()(hidden).float() / temperature
        total, row = logits.logsumexp(-1), torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        logp = logits[row, targets] - total[row]
        with torch.no_grad():
            entropy = total - torch.linalg.vecdot((logits - total[:, None]).exp(), logits)
        return logp, entropy[row]


def build(
    model: Path, mesh: DeviceMesh, dtype: torch.dtype, adapter: Adapter | None, *, recompute: bool
) -> PolicyModule:
    """The module of the prepared folder ``model``, sharded over ``mesh``, its weights not yet set except those of the
    LoRA ``adapter``; without one all parameters are trained. ``dtype`` is that of computation. With ``recompute``,
    layers are computed again in the backward pass (activation checkpointing)."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**json.loads((model / CONFIG).read_text(encoding="utf-8")))
    config.attention_dropout = 0.0

    stored = torch.float32 if adapter is None else dtype
    with no_init_weights():
        lm = AutoModelForCausalLM.from_config(config, dtype=stored, attn_implementation="sdpa")
    lm.tie_weights()
    layers = lm.train().base_model.layers
    if adapter is not None:
        lm.requires_grad_(False)
        for (layer, part), (a, b) in adapter.weights.items():
            block, name = layers[layer].get_submodule("self_attn" if part in "qkvo" else "mlp"), f"{part}_proj"
            setattr(block, name, LoraLinear(getattr(block, name), a, b, adapter.scale))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        if recompute:  # within FSDP's hooks: a layer's weights are gathered once for both
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    module = PolicyModule(lm)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def weights_of(module: PolicyModule) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of the model by their published names; those of a LoRA are left out."""
    for name, parameter in module.lm.named_parameters():
        if ".lora_" not in name:
            yield name.replace(".base.", "."), parameter


def lora_of(module: PolicyModule) -> Iterator[tuple[str, nn.Parameter]]:
    """LoRA parameters as ``LAYER.PART.A`` and ``LAYER.PART.B``: all A first, as in a native trainer's state."""
    found = dict(module.lm.named_parameters())
    for side in "ab":
        for name, parameter in found.items():
            if name.endswith(f".lora_{side}"):
                _, _, path = name.partition("layers.")
                layer, _, projection, _ = path.split(".")
                yield f"{layer}.{projection.removesuffix('_proj')}.{side.upper()}", parameter


def set_weights(module: PolicyModule, weights: Mapping[str, Tensor]) -> None:
    """Copy this process's shards of the whole ``weights``."""
    for name, parameter in weights_of(module):
        fill(parameter, weights[name])


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this process's shard of ``whole`` into ``parameter``, without communication."""
    assert isinstance(parameter, DTensor)
    source = whole.to(parameter.to_local().device)
    parameter.copy_(distribute_tensor(source, parameter.device_mesh, parameter.placements, src_data_rank=None))


def whole(parameter: Tensor) -> Tensor:
    """All of a sharded tensor, in main memory; every process must call it."""
    shard = parameter.detach()
    assert isinstance(shard, DTensor)
    return shard.full_tensor().cpu()


def local(parameter: Tensor | None) -> Tensor:
    """This process's shard."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
