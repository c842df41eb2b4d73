"""The command line, ``rookery``. It never imports torch; a worker is a separate process."""

from __future__ import annotations

from rookery.cli.app import main

__all__ = ["main"]
