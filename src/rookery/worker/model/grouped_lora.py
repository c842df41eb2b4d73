"""LoRA of many adapters in one stream as one product per factor, with shapes that do not depend on who is in it.

Promises:

* Rows are sorted by the adapter's place in the stack (``LoraBank.seat`` comes before the sorting); the last place is
  always zero and serves the base model's rows and padding.
* A row meets its own adapter's numbers only: a NaN in one adapter stays in its own rows.
* Nothing is asked of the device, so that a CUDA graph can hold it: who is where stands in a tensor (``ends``).

Two products do it, chosen by ``product_for``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [rows, in], w [places, in, out], ends [places] int32 → [rows, out]: rows from ``ends[i - 1]`` to ``ends[i]`` times
``w[i]``."""

_KERNELS = ((9, 0), (10, 0))
"""Compute capabilities with a grouped product in PyTorch that reads ``ends`` on the device; others go through a loop
that brings them to the host."""


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """PyTorch's grouped matrix product."""
    return F.grouped_mm(x, w, offs=ends)


def batched(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Every row times every place, of which its own is taken: as many times the work as there are places, in a few
    calls of any device."""
    rows = torch.arange(len(x), device=x.device)
    own = torch.searchsorted(ends, rows.to(ends.dtype), right=True)
    return torch.bmm(x.expand(len(w), *x.shape), w)[own, rows]


def product_for(device: torch.device, dtype: torch.dtype) -> Product:
    """``grouped`` where it is one kernel, else ``batched``."""
    if device.type == "cuda" and dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) in _KERNELS:
        return grouped
    return batched


class SortedLora:
    """``Lora`` of a sorted stream. ``a[site]`` [layers, places, ranks, in] and ``b[site]`` [layers, places, ranks, out]
    as the bank's stack holds them. Works in place on ``y``; not differentiable."""

    def __init__(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], ends: Tensor, product: Product) -> None:
        self._a, self._b = dict(a), dict(b)
        self._ends = ends
        self._product = product

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        if site not in self._a:
            return y
        inner = self._product(x, self._a[site][layer].transpose(1, 2), self._ends)
        return y.add_(self._product(inner, self._b[site][layer], self._ends))
