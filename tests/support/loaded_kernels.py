"""Loads the CPU kernels when it is imported, so that processes that are forked afterwards have them."""

from __future__ import annotations

from rookery.worker.engine.native import kernels

LOADED = kernels.load(None)
