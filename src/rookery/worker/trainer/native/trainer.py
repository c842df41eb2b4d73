"""The native trainer: the packed trainer over the decoder that the native engine samples with.

Promises, beyond those of :mod:`rookery.worker.trainer.packed_trainer`: a group's shared prompt is computed once,
forward and backward; where compiled kernels run, forward passes take the engine's (``kernel_pass``), bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rookery.worker.engine.native import kernels
from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.native.attention import AttentionFactory, attention_for
from rookery.worker.trainer.native.backbone import PassLimits, forward, infer, limits_for
from rookery.worker.trainer.native.loss_head import TokenLogprobs, token_logprobs
from rookery.worker.trainer.native.packed_lora import PackedLora, PolicyRows
from rookery.worker.trainer.native.packing import PackedBatch
from rookery.worker.trainer.packed_pass import BackwardPass


class NativeBackbone:
    """The decoder as a :class:`~rookery.worker.trainer.packed_pass.Backbone`."""

    def __init__(
        self,
        decoder: Decoder,
        limits: PassLimits | None = None,
        attention: AttentionFactory | None = None,
        *,
        compiled: bool = True,
        cache: Path | None = None,
    ) -> None:
        """``limits`` and ``attention`` default to those of the decoder's device; without ``attention``, ``compiled``
        allows the CPU kernels, whose code is cached under ``cache``."""
        self._decoder = decoder
        self._compiled = compiled and attention is None and kernels.usable(decoder, cache)
        self._attention = attention or attention_for(decoder)
        self.limits = limits or limits_for(decoder)
        self.projections = decoder.config
        self.context, self.vocab = decoder.config.context, decoder.config.vocab
        self.dtype, self.device = decoder.dtype, decoder.device

    def infer(self, batch: PackedBatch, policies: Sequence[PolicyRows]) -> Tensor:
        """See ``Backbone``."""
        if self._compiled:
            from rookery.worker.trainer.native import kernel_pass

            return kernel_pass.infer(self._decoder, batch, policies)
        lora = PackedLora(policies) if policies else None
        return infer(self._decoder, batch, self._attention(self._decoder, batch), lora)

    def forward(self, batch: PackedBatch, policies: Sequence[PolicyRows], *, recompute: bool) -> BackwardPass:
        """See ``Backbone``."""
        if self._compiled:
            from rookery.worker.trainer.native import kernel_pass

            return kernel_pass.KernelPass(self._decoder, batch, policies, recompute=recompute)
        attend = self._attention(self._decoder, batch)
        return forward(self._decoder, batch, attend, PackedLora(policies), recompute=recompute)

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None, *, derivatives: bool
    ) -> TokenLogprobs:
        """See ``Backbone``."""
        return token_logprobs(self._decoder, hidden, targets, temperatures, derivatives=derivatives)
