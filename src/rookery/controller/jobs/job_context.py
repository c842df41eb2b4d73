"""The shared state of one running job, assembled once and passed to its groups, episodes, steps and evaluations.

Fields only. Everything random in a job is derived from its spec's seed and from the place of what it is for
(:func:`~rookery.controller.jobs.trajectory.derive_seed`), so that it is the same after any restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.jobs.progress import Progress
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.spec.job import JobSpec
from rookery.storage.models import JobRow
from rookery.tokenization.chat import Chat


@dataclass(frozen=True)
class JobContext:
    controller: ControllerContext
    """The services of the controller."""
    row: JobRow
    """The job as it was stored when this process took it up."""
    spec: JobSpec
    """The validated job spec."""
    owner: str
    """Whose environment hosts may run its episodes: the tenant's id, or the service's own hosts."""
    options: dict[str, Any]
    """The environment's options, datasets resolved to paths."""
    chat: Chat
    """The chat template and tokenizer of the base model."""
    policy: PolicyVersions
    """The committed versions of the policy that it trains."""
    progress: Progress
    """Its counters, metrics and rewards."""
    warm_start: protocol.AdapterRef | None = None
    """The weights from which a policy without a version begins."""
