"""An adapter reaches the Hugging Face Hub whole, with a card, by the Hub's client; a stub is the Hub."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import yaml
from tests.support.faces import MODEL, Reach, ThreadedWorker, job, served

from rookery.cli import main
from rookery.client import Client, Job
from rookery.client.hub import CARD_ROWS, model_card, push_folder
from rookery.errors import Unavailable, UserError
from rookery.server.launcher import EmbeddedService


class Hub:
    """The part of the Hub's HTTP that an upload uses."""

    def __init__(self) -> None:
        self.url = ""
        self.token = "hf_secret"
        self.status = 0
        """The answer to everything, unless 0."""
        self.silent = ""
        """Part of the paths of requests that get no answer before ``ended``."""
        self.ended = threading.Event()
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        """By SHA-256."""

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path.startswith("/store/"):
            digest = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == digest
            self.large[digest] = body
            return 200, {}
        if self.status:
            return self.status, {"error": "no such thing"}
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            name = f"{self.created[-1]['organization']}/{self.created[-1]['name']}"
            return 200, {"url": f"{self.url}/{name}", "name": name}
        if path == "/api/validate-yaml":
            assert yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/preupload/main"):
            modes = [
                {"path": one["path"], "uploadMode": "lfs" if "safetensors" in one["path"] else "regular",
                 "shouldIgnore": False, "oid": None}
                for one in json.loads(body)["files"]
            ]  # fmt: skip
            return 200, {"files": modes}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "authenticated": True, "actions": {"upload": {"href": f"{self.url}/store/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.endswith("/commit/main"):
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    self.files[entry["value"]["path"]] = self.large[entry["value"]["oid"]]
            return 200, {"commitUrl": f"{self.url}/x/y/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}
        return 404, {"error": f"{method} {path}"}


@contextmanager
def stubbed() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if hub.silent and hub.silent in self.path:
                hub.ended.wait()
                self.close_connection = True
                return
            status, answer = hub.answer(self.command, self.path, self.headers, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = _answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with stubbed() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)  # as HF_ENDPOINT sets it
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("hub")) as service, ThreadedWorker.of(service):
        with Client(service.url, service.key) as client:
            spec = job(name="sums", evaluation={"prompts": 2})
            assert client.submit(spec).wait().state == "completed"
        yield service


def call(*arguments: str) -> object:
    """The exit code of the command line."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    return ended.value.code


def front(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_adapter_is_pushed_whole_with_its_card(service: EmbeddedService, hub: Hub, tmp_path: Path) -> None:
    with Client(service.url, service.key) as client:
        adapter = client.job("sums").adapter()
        address = adapter.push("acme/sums", license="apache-2.0")
        folder = adapter.download(tmp_path / "adapter")
    assert address == f"{hub.url}/acme/sums"
    assert hub.created[0]["organization"] == "acme" and hub.created[0]["visibility"] == "private"
    for file in folder.iterdir():
        assert hub.files[file.name] == file.read_bytes()
    card = hub.files["README.md"].decode()
    about = front(card)
    assert (about["license"], about["library_name"], about["tags"]) == (
        "apache-2.0",
        "peft",
        ["lora", "rookery", "grpo"],
    )
    assert about["base_model"]
    for part in ("id `jsonl`", "verifier `exact`", "| step | reward", "| 2 | ", "Evaluation on held-out prompts"):
        assert part in card, part
    assert "4+4?" not in card, "no row of the tenant"


def test_an_export_merges_into_the_base_model_of_the_policy_that_it_downloads(
    service: EmbeddedService, reach: Reach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where that is the first policy that trains, and has another base model than the job."""
    reach(service)
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    show = Job.show

    def shown(job: Job) -> Any:
        view = show(job)
        frozen = {"train": False, "base": True, "base_model": "judges"}
        view["spec"]["policies"] = {"judge": frozen, "main": {"train": True, "base_model": "other"}}
        return view

    monkeypatch.setattr(Job, "show", shown)
    for number, options in enumerate(([], ["--policy", "main"])):
        assert call("adapters", "export", "sums", "--merge", str(tmp_path / str(number)), *options) == 0
    assert all("other" in command and "judges" not in command for command in commands) and len(commands) == 2


def test_push_by_the_command_line(
    service: EmbeddedService, hub: Hub, reach: Reach, capsys: pytest.CaptureFixture[str]
) -> None:
    reach(service)
    assert call("adapters", "push", "sums@1", "acme/sums-1", "--public", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["version"] == 1 and printed["url"] == f"{hub.url}/acme/sums-1"
    card = hub.files["README.md"].decode()
    assert hub.created[0]["visibility"] == "public" and "version 1 of the policy `main`" in card
    assert "| steps | 1 |" in card and "| 1 | 0" in card and "\n| 2 |" not in card, "nothing of later versions"
    assert "license" not in front(card)
    assert call("adapters", "push", "sums@newest", "acme/sums") == 2
    assert "after the @ comes a version's number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "status, token, repo, error, wanted",
    [
        (0, "hf_other", "acme/sums", UserError, r"the Hub answers 401 for acme/sums.*HF_TOKEN"),
        (403, "hf_secret", "acme/sums", UserError, r"the Hub answers 403.*HF_TOKEN"),
        (500, "hf_secret", "acme/sums", Unavailable, r"the Hub answers 500"),
        (0, "hf_secret", "a/b/c", UserError, r"push: .*a/b/c"),
        (0, "hf_secret", "acme/..", UserError, r"push: "),
        (0, "hf_secret", "acme/a\nb", UserError, r"push: "),
    ],
)
def test_refusal_of_the_hub_is_one_line_without_the_token(
    service: EmbeddedService, hub: Hub, status: int, token: str, repo: str, error: type[Exception], wanted: str
) -> None:
    hub.status = status
    with Client(service.url, service.key) as client, pytest.raises(error, match=wanted) as raised:
        client.job("sums").adapter().push(repo, token=token)
    assert "\n" not in str(raised.value) and token not in str(raised.value)
    assert hub.files == {}


def test_hub_that_does_not_answer_is_one_line(service: EmbeddedService, hub: Hub) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
        with Client(service.url, service.key) as client, pytest.raises(Unavailable, match="the Hub does not answer"):
            client.job("sums").adapter().push("acme/sums")


@pytest.mark.parametrize("silent", ["/repos/create", "/preupload/", "/objects/batch", "/store/", "/commit/"])
def test_a_hub_that_is_silent_is_given_up(hub: Hub, tmp_path: Path, silent: str) -> None:
    """Wherever in a push that is. Without a limit it is waited for without end. On a busy machine the limit of the
    whole push may come first."""
    hub.silent = silent
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes(b"{}")
    hooks = {kind: [*calls] for kind, calls in huggingface_hub.get_session().event_hooks.items()}
    reasons = r"(timed out|no answer within|not complete after)"
    with pytest.raises(Unavailable, match=rf"push: the Hub does not answer: .*{reasons}"):
        push_folder(
            tmp_path, "acme/x", lambda repo: "---\nlibrary_name: peft\n---\n", token=hub.token, private=True,
            message="x", endpoint=hub.url, silent_seconds=0.2,
        )  # fmt: skip
    assert huggingface_hub.get_session().event_hooks == hooks, "other uses of the client keep theirs"


def test_card_of_a_long_job_is_short_and_its_texts_are_no_markup() -> None:
    spec = {
        "base_model": MODEL, "algorithm": {"name": "grpo", "group_size": 8, "groups_per_step": 4},
        "environment": {"hosted": "a `|` <b>name</b>\n# head"},
    }  # fmt: skip
    rows = [
        {"step": step, "version": step, "reward": step / 1000, "policy": name}
        for step in range(1100)
        for name in ("a", "b")
    ]
    view = {"spec": spec, "name": "job", "step": 1100}
    version = {"version": 999, "step": 999}
    card = model_card("acme/x", view, "b", version, rows, [], {"r": 4, "lora_alpha": 8}, None)
    result = {"version": 9, "prompts": 64, "mean": -1.2345, "stderr": None, "loss": 1.2345, "accuracy": None}
    rows_card = model_card("acme/x", view, "b", version, rows, [result], {"r": 4, "lora_alpha": 8}, None)
    assert "| version | loss | accuracy | held-out rows |" in rows_card and "| 9 | 1.2345 | – | 64 |" in rows_card
    table = [line for line in card.splitlines() if line[2:3].isdigit()]
    assert len(table) <= CARD_ROWS + 1 and table[0].startswith("| 0 |") and table[-1].startswith("| 999 |")
    assert "\n# head" not in card and "a `|`" not in card
    assert front(card)["base_model"] == MODEL
