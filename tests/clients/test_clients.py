"""The clients of docs/clients.md, unmodified, in an environment of their own (``make test-clients``)."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tests.support.faces import MODEL, ThreadedWorker, served, tokenizer
from tests.support.small_model import save_small_model
from tests.support.waiting import until
from tokenizers import Tokenizer

from rookery import protocol
from rookery.tokenization.registry import CONFIG, model_folder

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = {"inspect-ai": "inspect"}
"""Clients with an environment of their own; the others share one."""
CALL = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWER = "The sum is 3."


class AddingWorker(ThreadedWorker):
    """Says a word and calls ``add`` where the conversation has no result yet, then says the sum."""

    def __init__(self, url: str, token: str, words: Tokenizer) -> None:
        super().__init__(url, token, words, (CALL, ANSWER))
        self._marks = [words.encode(mark).ids for mark in ("<tools>", "<tool_response>")]

    def _chunk(self, message: protocol.Generate) -> protocol.TokenChunk:
        prompt = message.prompt
        offered, answered = (
            any(prompt[at : at + len(mark)] == mark for at in range(len(prompt))) for mark in self._marks
        )
        message.seed = int(answered or not offered)
        return super()._chunk(message)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    root = tmp_path_factory.mktemp("clients")
    base = str(save_small_model(root / "small", context=8192))
    with served(root / "scripted") as scripted, served(root / "random", models=base, workers=1, threads=1) as random:
        settings = scripted.settings
        path = model_folder(settings.cache, MODEL) / CONFIG
        path.write_text(path.read_text().replace("512", "8192"))
        token = (settings.data / "worker.token").read_text().strip()
        with AddingWorker(scripted.url, token, tokenizer(settings.cache.parent)):
            for service in (scripted, random):
                with OpenAI(base_url=f"{service.url}/v1", api_key=service.key) as client:
                    until(lambda client=client: client.models.list().data)
            yield {
                "PATH": os.environ["PATH"], "HOME": str(root), "OPENAI_BASE_URL": f"{scripted.url}/v1",
                "OPENAI_API_KEY": scripted.key, "MODEL": MODEL, "RANDOM_URL": f"{random.url}/v1",
                "RANDOM_KEY": random.key, "RANDOM_MODEL": base, "TOKENIZER": base, "HF_HUB_OFFLINE": "1",
            }  # fmt: skip


def interpreter(client: str) -> Path:
    return ROOT / ".bench" / ENVIRONMENTS.get(client, "clients") / "bin/python"


CLIENTS = re.findall(r"^\| `([\w-]+)` \|", (ROOT / "docs/clients.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("client", CLIENTS)
def test_client_works(environment: dict[str, str], client: str) -> None:
    program, python = ROOT / "tests/clients/programs.py", interpreter(client)
    if not python.is_file():
        pytest.skip("make test-clients installs the clients")
    ended = subprocess.run(
        [python, program, client], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
