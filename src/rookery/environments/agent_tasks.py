"""The built-in ``agent``: rows as tasks, whose episodes are driven by the processes that open them over HTTP."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from rookery.environments.base import Message, Reply, Step
from rookery.environments.jsonl import FileOptions, RowFiles, check_row, messages_of


class AgentTasksOptions(FileOptions):
    """Options of ``{id: agent}``: the episodes are opened, driven and ended by your own processes, over HTTP
    ([agents](agents.md#any-program-over-http)). A row is a task: it has a `prompt` (a text, or the messages of a chat)
    or `messages`, and any other fields, and reaches the process as it is. Give exactly one of `rows`, `path` and
    `dataset`, and at most one of the `eval_` fields. All rows are checked when the job is submitted."""


class AgentTasks(RowFiles):
    """Tasks alone: the process that opens an episode gives its reward."""

    def __init__(self, options: AgentTasksOptions, indexed: Mapping[str, array[int]] | None = None) -> None:
        """As :class:`RowFiles`."""
        super().__init__(options, indexed, check_row)

    def asked(self, row: Mapping[str, Any]) -> list[Message]:
        return messages_of(row)

    def step(self, reply: Reply) -> Step:
        raise NotImplementedError("an agent's process gives the reward")
