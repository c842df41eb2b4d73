"""Trials of graders whose model does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rookery.environments.models import ModelAnswer
from rookery.environments.verifiers.running_graders import ModelSilent
from rookery.server.grader_trials import GraderTrials


async def silent(asked: asyncio.Event, ended: asyncio.Event) -> ModelAnswer:
    asked.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()
    raise AssertionError


async def trial_that_waits(trials: GraderTrials) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """A trial whose model was asked, and the end of that question."""
    loop, asked, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def tried() -> ModelAnswer:
        return trials.answer(silent(asked, ended), loop)

    trial = asyncio.create_task(trials.threads(tried))
    await asked.wait()
    return trial, ended


@pytest.mark.timeout(30)
def test_a_trial_that_waits_for_a_model_does_not_keep_the_service_from_stopping() -> None:
    async def main() -> None:
        trials = GraderTrials("bubblewrap", "")
        trial, ended = await trial_that_waits(trials)
        await trials.close()
        with pytest.raises(ModelSilent, match="the service stops"):
            await trial
        await ended.wait()

        def late() -> ModelAnswer:
            return trials.answer(silent(asyncio.Event(), asyncio.Event()), loop)

        loop = asyncio.get_running_loop()
        with pytest.raises(ModelSilent, match="the service stops"):
            await asyncio.to_thread(late)

    asyncio.run(main())


@pytest.mark.timeout(30)
def test_a_model_that_is_silent_ends_its_trial() -> None:
    async def main() -> None:
        trials = GraderTrials("bubblewrap", "", answer_seconds=0.2)
        trial, ended = await trial_that_waits(trials)
        with pytest.raises(ModelSilent, match="does not answer"):
            await trial
        await ended.wait()
        await trials.close()

    asyncio.run(main())
