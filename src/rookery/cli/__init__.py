"""The command line, ``rookery``. Torch is never imported here; a worker is a process of its own."""

from __future__ import annotations

from rookery.cli.app import main

__all__ = ["main"]
