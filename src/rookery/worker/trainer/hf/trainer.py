"""Any causal language model of transformers as the ``Backbone`` of the packed trainer.

Promises, beyond those of :mod:`rookery.worker.trainer.packed_pass`:

* Where the model's attention can be replaced, a group's shared prompt is computed once, and blocks attend as in the
  native trainer. Otherwise every trajectory is a row, padded on the right, which a causal model does not see.
* In float32, losses, log-probabilities and gradients equal the native trainer's up to the order of sums.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rookery.worker.model.transformers_model import Attend, AttentionPlan, TransformersModel
from rookery.worker.trainer.loss_head import TokenLogprobs
from rookery.worker.trainer.packed_pass import PackedLora, PassLimits, PolicyRows
from rookery.worker.trainer.packing import AttentionBlock, PackedBatch, SoftTargets

RESIDENT_TOKENS = 2048
"""On a CPU, longer passes recompute their layers in the backward pass, as in the native trainer."""

HEAD_ROWS = 128
"""Rows projected to the vocabulary at once: three float32 copies of them exist, 75 MB each at 150,000 words."""

_PASS_COPIES = 2
"""Numbers that transformers' modules keep for each that a projection reads or writes: norms and activations compute in
float32 and keep their inputs."""


class BlockAttention:
    """The ``AttentionPlan`` of a packed batch."""

    def __init__(self, batch: PackedBatch) -> None:
        self._positions = batch.positions
        self._blocks = batch.blocks()
        self._inside = [
            torch.arange(b.queries.shape[2], device=b.lengths.device) < b.lengths[..., None] for b in self._blocks
        ]
        rows = torch.cat([block.queries[inside] for block, inside in zip(self._blocks, self._inside, strict=True)])
        self._order = torch.argsort(rows)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, attend: Attend) -> Tensor:
        outputs = []
        for i, (block, inside) in enumerate(zip(self._blocks, self._inside, strict=True)):
            mask = self._masks.get((i, window))
            if mask is None:
                mask = self._masks[i, window] = _mask(block, self._positions, window)
            keys = block.keys.flatten(0, 1)
            out = attend(_rows(q, block.queries.flatten(0, 1)), _rows(k, keys), _rows(v, keys), mask)
            outputs.append(out[inside.flatten(0, 1)])
        return torch.cat(outputs).index_select(0, self._order)[None]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [1, heads, tokens, d], index [n, length] → [n, heads, length, d]."""
    n, length = index.shape
    return x[0].index_select(1, index.flatten()).view(x.shape[1], n, length, x.shape[3]).transpose(0, 1)


def _mask(block: AttentionBlock, positions: Tensor, window: int) -> Tensor:
    """Where a query attends [packs · members, 1, tail, prefix + tail]; a padding query as the one that it repeats."""
    tail = torch.arange(block.queries.shape[2], device=positions.device)
    prefix = torch.arange(block.prefix, device=positions.device) < block.prefixes[:, None, None]
    real = torch.cat([prefix.expand(-1, block.keys.shape[1], -1), tail < block.lengths[..., None]], 2)
    gap = positions[block.queries][..., :, None] - positions[block.keys][..., None, :]
    seen = real[..., None, :] & (gap >= 0)
    return (seen & (gap < window) if window else seen).flatten(0, 1)[:, None]


@dataclass(frozen=True)
class _Layout:
    """A packed batch as the model's input: ``index`` [rows, length] are tokens of the batch, ``mask`` as in
    ``TransformersModel.hidden``; ``pick`` [tokens] finds each token of the batch in the flattened result (None: they
    are the same); ``policies`` are rows of the flattened input."""

    index: Tensor
    mask: Tensor | None
    pick: Tensor | None
    policies: list[PolicyRows]


def _padded(batch: PackedBatch, policies: Sequence[PolicyRows]) -> _Layout:
    """Every trajectory is a row, its prompt included; of a shared prompt's copies the first one's output counts."""
    rows, device = [], batch.tokens.device
    starts: list[int] = []
    alone = {pack.start for pack in batch.packs if pack.prefix}
    for pack in batch.packs:
        for start, length in pack.tails:
            if pack.prefix or start not in alone:  # not a prompt whose members follow
                starts.append(pack.start)
                rows.append(
                    torch.cat([torch.arange(pack.start, pack.start + pack.prefix), torch.arange(start, start + length)])
                )
    order = sorted(range(len(rows)), key=lambda i: starts[i])
    index = pad_sequence([rows[i] for i in order], batch_first=True, padding_value=-1).to(device)
    mask = index >= 0
    where = torch.arange(index.numel(), device=device).view_as(index)
    pick = torch.full((len(batch.tokens),), index.numel(), device=device)
    pick.scatter_reduce_(0, index[mask], where[mask], "amin")
    first = torch.tensor([starts[i] for i in order])
    length = index.shape[1]
    spans = [((first < p.start).sum().item(), (first < p.stop).sum().item()) for p in policies]
    moved = [
        PolicyRows(int(begin) * length, int(end) * length, p.policy)
        for (begin, end), p in zip(spans, policies, strict=True)
    ]
    return _Layout(index.clamp(min=0), mask, pick, moved)


@dataclass
class TransformersPass:
    hidden: Tensor
    _backbone: TransformersBackbone
    _output: Tensor
    _lora: PackedLora
    _rows: int
    _plan: AttentionPlan | None

    def backward(self, d_hidden: Tensor) -> None:
        """Propagates d loss / d hidden back, once; layers that are recomputed find their adapters and plan."""
        with self._backbone.model.adapted(self._lora, self._rows, self._plan):
            self._output.backward(d_hidden)


class TransformersBackbone:
    paused = 0.0

    def __init__(self, model: TransformersModel, memory_bytes: float = math.inf) -> None:
        """Activations of a pass take about ``memory_bytes`` at most."""
        self.model = model
        self.limits = _limits(model, memory_bytes)

    def infer(self, batch: PackedBatch, policies: Sequence[PolicyRows]) -> Tensor:
        with torch.no_grad():
            return self._compute(batch, policies, recompute=False)._output

    def forward(self, batch: PackedBatch, policies: Sequence[PolicyRows], *, recompute: bool) -> TransformersPass:
        with torch.enable_grad():
            return self._compute(batch, policies, recompute=recompute)

    def _compute(self, batch: PackedBatch, policies: Sequence[PolicyRows], *, recompute: bool) -> TransformersPass:
        plan = BlockAttention(batch) if self.model.streams else None
        if plan is not None:
            layout = _Layout(
                torch.arange(len(batch.tokens), device=self.model.device)[None], None, None, list(policies)
            )
        else:
            layout = _padded(batch, policies)
        rows, lora = layout.index.numel(), PackedLora(layout.policies)
        with self.model.adapted(lora if layout.policies else None, rows, plan):
            positions = None if plan is None else batch.positions[layout.index]
            output = self.model.hidden(batch.tokens[layout.index], positions, mask=layout.mask, recompute=recompute)
        output = output.flatten(0, 1)
        if layout.pick is not None:
            output = output.index_select(0, layout.pick)
        return TransformersPass(output.detach(), self, output, lora, rows, plan)

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        *,
        derivatives: bool,
        soft: SoftTargets | None = None,
    ) -> TokenLogprobs:
        """Compute d logp / d hidden by autograd through the model's head, a chunk at a time: a row's
        log-probability depends on that row alone, so the gradient of their sum has the row's derivative in each row."""
        if soft is not None:
            return self._soft_logprobs(hidden, soft, targets, temperatures, derivatives=derivatives)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        slopes = torch.empty(hidden.shape, dtype=dtype, device=hidden.device) if derivatives else None
        for start in range(0, len(hidden), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            with torch.set_grad_enabled(derivatives):
                h = hidden[rows].detach().requires_grad_(derivatives)
                all_logp = self._log_softmax(h, None if temperatures is None else temperatures[rows])
                chosen = all_logp.gather(1, targets[rows, None])[:, 0]
            logp[rows] = chosen.detach()
            if slopes is not None:
                all_logp = all_logp.detach()
                entropy[rows] = -torch.linalg.vecdot(all_logp.exp(), all_logp)
                (slopes[rows],) = torch.autograd.grad(chosen.sum(), h)
        return TokenLogprobs(logp, slopes, entropy if derivatives else None)

    def _soft_logprobs(
        self, hidden: Tensor, soft: SoftTargets, targets: Tensor, temperatures: Tensor | None, *, derivatives: bool
    ) -> TokenLogprobs:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy = (torch.empty(len(targets), dtype=dtype, device=hidden.device) for _ in range(2))

        def chunks() -> Iterator[tuple[slice, Tensor, Tensor, slice, Tensor]]:
            """Rows, their hidden states and log-probabilities; their targets, and the row of each within the chunk."""
            for start in range(0, len(hidden), HEAD_ROWS):
                rows = slice(start, min(start + HEAD_ROWS, len(hidden)))
                h = hidden[rows].detach().requires_grad_(torch.is_grad_enabled())
                words = self._log_softmax(h, None if temperatures is None else temperatures[rows])
                yield rows, h, words, *soft.of_rows(rows.start, rows.stop)

        with torch.no_grad():
            for _, _, words, span, row in chunks():
                logp[span] = words[row, targets[span]]
                entropy[span] = -torch.linalg.vecdot(words.exp(), words)[row]

        @torch.enable_grad()
        def gradient(d_logp: Tensor) -> Tensor:
            total = torch.empty(hidden.shape, dtype=dtype, device=hidden.device)
            for rows, h, words, span, row in chunks():
                (total[rows],) = torch.autograd.grad(words[row, targets[span]], h, d_logp[span])
            return total

        return TokenLogprobs(logp, None, entropy, gradient) if derivatives else TokenLogprobs(logp, None, None)

    def _log_softmax(self, hidden: Tensor, temperatures: Tensor | None) -> Tensor:
        with self.model.adapted(None, 0):
            z = self.model.compute_logits(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
        return (z if temperatures is None else z / temperatures[:, None]).log_softmax(-1)


def _limits(model: TransformersModel, memory_bytes: float) -> PassLimits:
    resident = sys.maxsize if model.device.type == "cuda" else RESIDENT_TOKENS
    if memory_bytes == math.inf:
        return PassLimits(resident, sys.maxsize)
    config = model.config
    layers, hidden = config.num_hidden_layers, config.hidden_size
    projections = sum(map(sum, model.projections.shapes.values())) / layers
    experts = (getattr(config, "num_experts_per_tok", 0) or 0) * (
        hidden + 3 * (getattr(config, "moe_intermediate_size", 0) or getattr(config, "intermediate_size", 0) or 0)
    )
    layer = _PASS_COPIES * (4 * hidden + projections + experts)
    item = model.dtype.itemsize
    kept, recomputed = (layers + 1) * layer, layers * hidden + 2 * layer
    copied = 1.0 if not model.streams else projections / layer / 2  # each member's row has the whole prompt
    return PassLimits(min(resident, int(memory_bytes / (item * kept))), int(memory_bytes / (item * recomputed)), copied)
