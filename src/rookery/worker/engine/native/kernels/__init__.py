"""The engine's CPU kernels, where a machine can run them; elsewhere PyTorch's operations do the same work."""

from __future__ import annotations

from pathlib import Path

from rookery.worker.engine.native.kernels import runtime
from rookery.worker.model.config import DecoderConfig


def load(folder: Path | None) -> bool:
    """Compiles all kernels, once per process, and caches their code under ``folder`` (``runtime.load``). Returns False
    where they cannot run."""
    if runtime.why_unavailable():
        return False
    from rookery.worker.engine.native.kernels import attention, lora, sampler

    runtime.load([sampler.KERNEL, lora.KERNEL, attention.ROTATE, attention.ATTEND], folder)
    return True


def fits(config: DecoderConfig) -> bool:
    """Whether the kernels compute this model: its widths are multiples of a vector's 16 numbers."""
    widths = (config.hidden, config.head_dim, config.site_shape("down")[0])
    return all(width % 16 == 0 for width in widths)
