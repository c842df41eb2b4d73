"""Which worker holds which policies. Asking either way, and losing a worker, looks at nobody else's."""

from __future__ import annotations

from rookery.controller.fleet.worker import Worker


class PolicyAssignments:
    def __init__(self) -> None:
        self._worker: dict[str, Worker] = {}
        self._policies: dict[Worker, set[str]] = {}

    def get(self, policy: str) -> Worker | None:
        return self._worker.get(policy)

    def count(self, worker: Worker) -> int:
        """How many policies it holds."""
        return len(self._policies.get(worker, ()))

    def put(self, policy: str, worker: Worker) -> None:
        """``worker`` holds it from now on, and nobody else does."""
        self.pop(policy)
        self._worker[policy] = worker
        self._policies.setdefault(worker, set()).add(policy)

    def pop(self, policy: str) -> Worker | None:
        """Nobody holds it any more; answers who did."""
        worker = self._worker.pop(policy, None)
        if worker is not None:
            self._policies[worker].discard(policy)
        return worker

    def leave(self, worker: Worker) -> None:
        """It holds nothing any more."""
        for policy in self._policies.pop(worker, set()):
            del self._worker[policy]
