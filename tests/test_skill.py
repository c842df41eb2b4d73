"""Every command of the skill for coding agents runs as written, on the real model: ``make test-examples``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ports import free_port
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1200)]

SKILL = Path(__file__).parents[1] / "skills" / "rookery" / "SKILL.md"


def test_commands_of_the_skill_run_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", SKILL.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    command = tmp_path / "bin" / "rookery"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m rookery.cli "$@"\n')
    command.chmod(0o755)
    given = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
    environment = given | {"PATH": f"{command.parent}:{given['PATH']}", "ROOKERY_PORT": str(free_port())}
    script = "set -euo pipefail\ntrap 'kill %1; wait' EXIT\n" + "\n".join(blocks)
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    log = tmp_path / "serve.log"
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:] + (log.read_text() if log.exists() else "")
    assert "sums" in (tmp_path / "sums.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "sums-adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    AutoModelForCausalLM.from_pretrained(tmp_path / "sums-merged")


def test_inline_commands_of_the_skill_exist() -> None:
    named = set(re.findall(r"`rookery ([a-z]+(?: [a-z]+)?)", SKILL.read_text(encoding="utf-8")))
    assert {"jobs resume", "jobs cancel", "jobs delete", "adapters push", "open", "doctor", "serve"} <= named
    for words in named:
        ran = subprocess.run([sys.executable, "-m", "rookery.cli", *words.split(), "--help"], capture_output=True)
        assert ran.returncode == 0, words
