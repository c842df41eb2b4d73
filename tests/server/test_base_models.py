"""Preparing base models is bounded in number and time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rookery.errors import Unavailable
from rookery.server.base_models import BaseModels


async def test_models_are_prepared_one_after_another_and_each_has_a_time_limit(tmp_path: Path) -> None:
    """The child needs longer to import torch than the limit allows."""
    models = BaseModels(tmp_path, 0.3)
    began = time.monotonic()
    ends = await asyncio.gather(*(models.chat(f"some/model{number}") for number in range(3)), return_exceptions=True)
    assert time.monotonic() - began >= 0.9, "one at a time"
    for end in ends:
        assert isinstance(end, Unavailable) and "took longer than 0.3 s" in str(end), end
    await models.close()
