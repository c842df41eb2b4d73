"""The CPU kernels of engine and trainer, where a machine can run them; elsewhere PyTorch's operations do the work."""

from __future__ import annotations

from pathlib import Path

from rookery.worker.engine.native.kernels import runtime
from rookery.worker.model.decoder import Decoder


def load(folder: Path | None) -> bool:
    """Compiles all kernels, once per process, and caches their code under ``folder`` (``runtime.load``). Returns False
    where they cannot run."""
    if runtime.why_unavailable():
        return False
    from rookery.worker.engine.native.kernels import attention, gradients, lora, sampler

    runtime.load([sampler.KERNEL, lora.KERNEL, attention.ROTATE, attention.ATTEND, *gradients.KERNELS], folder)
    return True


def usable(decoder: Decoder, folder: Path | None) -> bool:
    """Whether the kernels compute this model: on a CPU, with widths that are multiples of a vector's 16 numbers. Then
    they are loaded (``load``)."""
    config = decoder.config
    widths = (config.hidden, config.head_dim, config.inner, config.heads * config.head_dim)
    return decoder.device.type == "cpu" and all(width % 16 == 0 for width in widths) and load(folder)
