"""The command line of the SDK against the service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from tests.support.tinkered import MODEL, PATIENCE, steps, trainer

from rookery.server.launcher import EmbeddedService
from rookery.server.peft_archive import ADAPTER_FILES

pytestmark = pytest.mark.heavy


class Commands:
    """``tinker`` as a user of the service runs it."""

    def __init__(self, service: EmbeddedService, home: Path) -> None:
        self._environment = {
            **os.environ, "TINKER_BASE_URL": f"{service.url}/tinker", "TINKER_API_KEY": service.key, "HOME": str(home),
        }  # fmt: skip

    def run(self, *words: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "tinker.cli", "--format", "json", *words]
        ended = subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stdout if status == 0 else ended.stderr

    def read(self, *words: str) -> Any:
        return json.loads(self.run(*words))


def test_commands_list_show_download_and_delete(
    service: EmbeddedService, visitor: tinker.ServiceClient, tmp_path: Path
) -> None:
    tinker_command, training = Commands(service, tmp_path), trainer(visitor)
    steps(training, 1)
    run = training.model_id
    kept = training.save_state("kept").result(PATIENCE).path
    training.save_weights_for_sampler("named").result(PATIENCE)
    assert run in [row["training_run_id"] for row in tinker_command.read("run", "list")["runs"]]
    assert tinker_command.read("run", "info", run)["lora_rank"] == 4
    assert MODEL in tinker_command.run("model", "list")
    listed = tinker_command.read("checkpoint", "list", "--run-id", run)["checkpoints"]
    assert {row["checkpoint_type"] for row in listed} == {"training", "sampler"}
    assert kept in [row["tinker_path"] for row in tinker_command.read("checkpoint", "list")["checkpoints"]]
    tinker_command.run("checkpoint", "set-ttl", kept, "--ttl", "7200")
    assert tinker_command.read("checkpoint", "info", kept)["expires_at"] is not None
    tinker_command.run("checkpoint", "download", kept, "--output", str(tmp_path / "got"))
    assert {path.name for path in (tmp_path / "got").rglob("*") if path.is_file()} == {*ADAPTER_FILES}
    session = run.partition(":")[0]
    tinker_command.run("session", "export-trace", session, "--output", str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert tinker_command.read("checkpoint", "delete", kept, "--yes")["deleted_count"] == 1
    assert kept not in tinker_command.run("checkpoint", "list", "--run-id", run)
    assert "no public catalogue" in tinker_command.run("checkpoint", "publish", kept, status=1)
