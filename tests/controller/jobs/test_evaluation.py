"""Evaluations: the prompts that all versions of a job answer."""

from __future__ import annotations

from itertools import count

import msgspec
from tests.controller.jobs.test_policies import debate, submit
from tests.support.peers import Service

from rookery import protocol


async def test_all_versions_of_all_policies_answer_the_same_prompts(service: Service) -> None:
    """Also where the split gives others each time that it is asked, and evaluations begin before one is stored."""
    _, host = await service.join(script=debate)
    usual, asked = host.prompts, count()

    def prompts(message: protocol.GetPrompts) -> protocol.Prompts:
        found = usual(message)
        if message.split == "train":
            return found
        return msgspec.structs.replace(found, prompts=[b"[%d,%s]" % (next(asked), one) for one in found.prompts])

    host.prompts = prompts  # type: ignore[method-assign]
    job = await submit(service, evaluation={"prompts": 3, "every": 1})
    await service.ends(job)
    found = await service.controller.queries.evaluations("alice", job)
    assert sorted((one.policy, one.version) for one in found) == [
        (policy, version) for policy in ("solver", "verifier") for version in range(3)
    ]
    assert len({tuple(str(result.prompt) for result in one.held_out) for one in found}) == 1
