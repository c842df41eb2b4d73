"""Preparing base models is bounded in number and time."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
import weakref
from pathlib import Path

import pytest
from tests.support.faces import write_model

from rookery.errors import Unavailable
from rookery.server import base_models
from rookery.server.base_models import BaseModels
from rookery.tokenization.registry import model_folder


async def test_models_are_prepared_one_after_another_and_each_has_a_time_limit(tmp_path: Path) -> None:
    """The child needs longer to import torch than the limit allows."""
    models = BaseModels(tmp_path, 0.3)
    began = time.monotonic()
    ends = await asyncio.gather(*(models.chat(f"some/model{number}") for number in range(3)), return_exceptions=True)
    assert time.monotonic() - began >= 0.9, "one at a time"
    for end in ends:
        assert isinstance(end, Unavailable) and "took longer than 0.3 s" in str(end), end
    await models.close()


async def test_models_that_were_used_last_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that names one model after another fills no memory with tokenizers."""
    monkeypatch.setattr(base_models, "CHATS_KEPT", 2)
    written, names = write_model(tmp_path), [f"some/model{number}" for number in range(4)]
    for name in names:
        shutil.copytree(written, model_folder(tmp_path, name))
    models = BaseModels(tmp_path)
    used = await models.chat(names[0])
    found = [weakref.ref(await models.chat(name)) for name in names[1:]]
    await models.chat(names[0])
    gc.collect()
    assert [one() is not None for one in found] == [False, False, True]
    assert await models.chat(names[0]) is not used, "it was loaded again, and stays with its users"
    assert await models.chat(names[3]) is found[2]()
    await models.close()
