"""``python -m rookery.cli`` is ``rookery``."""

from __future__ import annotations

from rookery.cli.app import main

main()
