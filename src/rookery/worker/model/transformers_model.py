"""A causal language model of transformers, frozen: its arithmetic as published, with adapters and attention brought in.

Promises:

* The base is in memory once. Adapters are added by hooks on its linear modules; attention, where the model lets it be
  replaced, is computed by an :class:`AttentionPlan`, so that sequences of several requests or trajectories share one
  stream of tokens. A model with other layers (:attr:`TransformersModel.streams` is False) computes one sequence a row.
* Supported are linear modules of the decoder's layers: attention, linear attention, dense MLPs; dense and shared MLPs
  of a model with routed experts where PEFT adapts them. Weights of routed experts and routers are not adapted: their
  inputs are not the stream's tokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers.utils.logging
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import MoeModelOutputWithPast

from rookery.errors import UserError, count_of
from rookery.tokenization.registry import PREPARED
from rookery.worker.model.adapter import part_of
from rookery.worker.model.decoder import LoraProduct, best_dtype
from rookery.worker.model.published import published

_ATTENTION = "rookery"
"""Name of the attention in transformers' registry."""

_STREAMED = {"full_attention", "sliding_attention"}
"""Kinds of layers that an :class:`AttentionPlan` computes. Others (linear attention, state spaces, chunks) mix tokens
in other ways."""

_NOT_ADAPTED = re.compile(r"(^|\.)experts\.|(^|\.)(gate|router|shared_expert_gate|kv_b_proj)(\.|$)")
"""Modules whose inputs are not the stream's tokens: routed ones, and the projection that latent attention applies to
all cached tokens again."""

_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
"""Names of the number of routed experts in configurations."""
_MLP = re.compile(r"(^|\.)(gate|up|down)_proj$")

_DENSE_BESIDE_EXPERTS = ("aria_text", "hy_v3", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families with experts of which PEFT adapts the dense and shared MLPs, too. Of others it takes the names of these
modules for the experts', and leaves them out of an adapter that it reads."""

_NOTHING = "(?!)"
"""Matches no text."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The model's own attention: q [n, heads, queries, d], k and v [n, kv_heads, keys, d], mask [n or 1, 1, queries, keys],
True where a query attends (None: everywhere) → [n, queries, heads, d]."""


class AttentionPlan(Protocol):
    """How the tokens of a stream attend to each other."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> Tensor:
        """q [1, heads, tokens, d], k and v [1, kv_heads, tokens, d], rotated; ``window`` as in ``DecoderConfig``
        (0: none) → [1, tokens, heads, d]."""
        ...


class _Current:
    """The plan of the pass that computes now. A module reaches it only globally, and a GPU's backward pass, which
    recomputes layers, runs in another thread."""

    plan: AttentionPlan | None = None


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, sliding_window: int | None = None, **given: Any
) -> tuple[Tensor, None]:
    """The function that the model's attention modules call."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if given.get("s_aux") is None and given.get("softcap") is None:
            return sdpa_attention_forward(module, q, k, v, mask, **given)[0]
        if mask is not None:  # with sinks or a cap, the model's own formula, whose masks are added
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        result: Tensor = eager(module, q, k, v, mask, **given)[0]
        return result

    assert _Current.plan is not None, "a streamed model computes under a plan only"
    layer: int = module.layer_idx  # type: ignore[assignment]
    return _Current.plan(layer, q, k, v, sliding_window or 0, attend), None


AttentionInterface.register(_ATTENTION, _attention)


@dataclass(frozen=True)
class UniformCache:
    """Sizes of the keys and values of a model whose layers are alike."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LinearProjections:
    """Each linear module is a separate site."""

    shapes: Mapping[tuple[int, str], tuple[int, int]]
    sites: Mapping[str, tuple[str, ...]]
    prefix: str


def _linear_modules(model: PreTrainedModel) -> tuple[list[nn.Module], dict[tuple[int, str], nn.Linear], str]:
    """The decoder's layers, their linear modules that a LoRA may change by (layer, part), and the name of the list of
    layers. Raises ``UserError`` for a model without."""
    config = model.config.get_text_config(decoder=True)
    count, parts = config.num_hidden_layers, set(model.get_decoder().modules())
    routed = any(getattr(config, name, None) for name in _EXPERT_COUNTS)
    attention_only = routed and config.model_type not in _DENSE_BESIDE_EXPERTS
    for prefix, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and module in parts:
            linear = {
                (i, part_of(name)): part
                for i, layer in enumerate(module)
                for name, part in layer.named_modules()
                if isinstance(part, nn.Linear)
                and not _NOT_ADAPTED.search(name)
                and not (attention_only and _MLP.search(name))
            }
            if linear:
                return list(module), linear, prefix
    raise UserError(
        f"base_model: {type(model).__name__} has no linear modules in a list of {count_of(count, 'decoder layer')}, so"
        " no LoRA can change it; rookery models lists models that can be trained"
    )


def check_transformers(raw: Mapping[str, Any]) -> tuple[LinearProjections, re.Pattern[str]]:
    """The projections of a model with this ``config.json``, and a pattern that names of weights match which it computes
    with in float32 where others are in bfloat16. Raises ``UserError`` if it cannot be a :class:`TransformersModel`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    _, linear, prefix = _linear_modules(model)
    kept = sorted(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    exact = "|".join(name.replace("*", ".*") for name in kept) or _NOTHING
    return _projections(linear, prefix), re.compile(exact)


def _projections(linear: Mapping[tuple[int, str], nn.Linear], prefix: str) -> LinearProjections:
    shapes = {key: (module.in_features, module.out_features) for key, module in linear.items()}
    return LinearProjections(shapes, {part: (part,) for _, part in shapes}, prefix)


class _Computed(MoeModelOutputWithPast):
    """A decoder's output with hidden states only. What else a family's decoder returns, its head passes on unread."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class TransformersModel:
    def __init__(self, model: PreTrainedModel) -> None:
        """``model`` is frozen and set to evaluation. Raises ``UserError`` for one without decoder layers."""
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = model.get_decoder()
        self.context: int = getattr(self.config, "max_position_embeddings", 1 << 20)
        self.vocab: int = self.config.vocab_size
        self.dtype, self.device = model.dtype, model.device
        kinds = set(getattr(self.config, "layer_types", None) or ["full_attention"])
        shared = getattr(self.config, "num_kv_shared_layers", 0)
        self.streams = model._supports_attention_backend and kinds <= _STREAMED and not shared
        """Whether tokens of several sequences may share a stream."""
        if self.streams:
            model.set_attn_implementation(_ATTENTION)
        self.lora: LoraProduct | None = None
        self._rows = 0
        self._layers, linear, prefix = _linear_modules(model)
        self.projections = _projections(linear, prefix)
        for key, module in linear.items():
            module.register_forward_hook(partial(self._add_lora, key))
        if model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.bytes = sum(weight.nbytes for weight in model.state_dict().values())
        self.cache_shape = self._probe() if self.streams else None
        """None where layers have keys and values of several shapes, or other states."""

    @classmethod
    def load(
        cls, folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> TransformersModel:
        """The model of a prepared folder, or one with weights in the published layout. Raises ``UserError``."""
        transformers.utils.logging.disable_progress_bar()  # a worker's log is no terminal
        source = published(folder) if (folder / PREPARED).is_file() else folder
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype or best_dtype(device), output_loading_info=True
            )
        except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"base_model: transformers cannot load {folder.name}: {first}") from None
        model, found = loaded
        if found["missing_keys"]:  # transformers would draw them
            raise UserError(f"base_model: the weights of {folder.name} lack {min(found['missing_keys'])}")
        return cls(nn.Module.to(model, device))

    def _probe(self) -> UniformCache | None:
        shapes: dict[int, tuple[int, int, int]] = {}

        def record(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> Tensor:
            shapes[layer] = k.shape[1], k.shape[3], v.shape[3]
            return attend(q, k, v, None)

        with torch.no_grad(), self.adapted(None, 0, record):
            self.hidden(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        layers = len(self._layers)
        if set(shapes) != set(range(layers)) or len(set(shapes.values())) > 1:
            return None
        heads, size, values = shapes[0]
        return UniformCache(layers, heads, size) if size == values else None

    def _add_lora(self, key: tuple[int, str], module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        if self.lora is None:
            return None
        x = given[0].flatten(0, -2)
        if len(x) != self._rows:
            raise RuntimeError(f"projection {key} computed {count_of(len(x), 'row')} of a stream of {self._rows}")
        return self.lora(*key, x, y.flatten(0, -2)).view_as(y)

    @contextmanager
    def adapted(self, lora: LoraProduct | None, rows: int, plan: AttentionPlan | None = None) -> Iterator[None]:
        """Passes of ``rows`` tokens within compute ``lora`` and attend by ``plan``."""
        before = self.lora, self._rows, _Current.plan
        self.lora, self._rows, _Current.plan = lora, rows, plan
        try:
            yield
        finally:
            self.lora, self._rows, _Current.plan = before

    @contextmanager
    def as_published(self) -> Iterator[None]:
        """Passes within use the model's own attention."""
        if self.streams:
            self.model.set_attn_implementation("eager")
        try:
            yield
        finally:
            if self.streams:
                self.model.set_attn_implementation(_ATTENTION)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """tokens and positions [rows, length] → hidden states [rows, length, hidden] that :meth:`compute_logits` reads.
        ``mask`` [rows, length] is False at padding. With ``recompute``, gradients recompute the layers."""
        for layer in self._layers:
            layer.training = recompute  # of the layer alone: it decides about recomputing, its parts about dropout
        output = self.decoder(
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache,
            use_cache=cache is not None,
        )  # fmt: skip
        hidden: Tensor = output.last_hidden_state
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden] → logits [n, vocab], with the model's scaling and caps. These exist as code of the whole
        model only; so the model runs with a decoder that returns ``hidden``."""
        output = _Computed(last_hidden_state=hidden[None])
        self.decoder.forward = lambda *_, **__: output
        try:
            logits: Tensor = self.model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del self.decoder.forward
        return logits
