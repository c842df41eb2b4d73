"""The engine's CPU kernels, where a machine can run them; elsewhere PyTorch's operations do the same work."""

from __future__ import annotations

from pathlib import Path

from rookery.worker.engine.native.kernels import runtime


def load(folder: Path | None) -> bool:
    """Compiles all kernels, once per process, and caches their code under ``folder`` (``runtime.load``). Returns False
    where they cannot run."""
    if runtime.why_unavailable():
        return False
    from rookery.worker.engine.native.kernels import sampler

    runtime.load([sampler.KERNEL], folder)
    return True
