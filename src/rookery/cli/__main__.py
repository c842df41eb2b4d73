"""``python -m rookery.cli`` is ``rookery``."""

from __future__ import annotations

from rookery.cli import main

main()
