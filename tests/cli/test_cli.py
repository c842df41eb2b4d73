"""The command line: every command against a real service, exit codes, one-line errors, Ctrl-C."""

from __future__ import annotations

import errno
import io
import itertools
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import requires
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import httpx
import psutil
import pytest
import yaml
from tests.support import waiting
from tests.support.commands import commands, options_of
from tests.support.faces import MODEL, ThreadedWorker, job, served, write_model
from tests.support.small_model import save_small_model
from tests.support.traces import check

import rookery
from rookery.cli import main
from rookery.cli.doctor import EXTRAS, accelerator_finding, bf16_finding, kernels_finding
from rookery.cli.options import check_child
from rookery.client import Client, Job, Record
from rookery.errors import REFUSED_BY_DISK, NotFound, RookeryError, UserError
from rookery.server.launcher import EmbeddedService
from rookery.server.schemas import TenantLimits
from rookery.settings import CLIENT_SETTINGS, Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.place import HOLD_SECONDS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    root = tmp_path_factory.mktemp("cli")
    with served(root) as running, ThreadedWorker.of(running), Client(running.url, running.key) as client:
        waiting.until(lambda: any(worker["state"] == "serving" for worker in client.workers()))
        yield running


@pytest.fixture
def here(service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory whose commands reach the service."""
    settings = service.settings
    reached = {"ROOKERY_URL": service.url, "ROOKERY_DATA": settings.data, "ROOKERY_CACHE": settings.cache}
    for name, value in reached.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with a prepared tiny model, where no service answers and none starts workers."""
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)
    cache, home = str(tmp_path / "cache"), str(tmp_path)
    for name, value in {"ROOKERY_CACHE": cache, "ROOKERY_WORKERS": "0", "ROOKERY_PORT": "9", "HOME": home}.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Typed(io.StringIO):
    """Lines that are typed at a terminal."""

    def isatty(self) -> bool:
        return True


def call(*arguments: object, stdin: str | TextIO | None = None, **variables: object) -> int:
    """The exit code of a command with this standard input, and these variables beside those of the test."""
    given = {name: str(value) for name, value in variables.items()}
    with ExitStack() as around, patch.dict(os.environ, given), pytest.raises(SystemExit) as ended:
        if stdin is not None:
            around.enter_context(patch.object(sys, "stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin))
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def written(folder: Path, spec: dict[str, Any]) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_run_follows_a_job_to_its_end_and_downloads_its_adapter(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sums.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 3)
    environment = {"id": "jsonl", "path": "sums.jsonl", "verifier": "exact", "eval_last": 1}
    path = written(here, job(name="file", environment=environment, evaluation={"prompts": 1}))
    assert call("run", path, "--adapter", here / "adapter") == 0
    said = capsys.readouterr().out
    assert "completed" in said and "version 2:" in said and "step     1  reward" in said
    assert (here / "adapter" / "adapter_config.json").exists()


def test_run_with_json_prints_one_object_per_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", written(here, job(name="scripted")), "--json") == 0
    said = lines(capsys.readouterr().out)
    assert [line["metrics"]["step"] for line in said if "metrics" in line] == [1, 2]
    assert said[-1]["job"]["state"] == "completed" and said[-1]["adapter"] is None


def test_exit_code_of_run_follows_the_jobs_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"id": "jsonl", "rows": [{"prompt": "x" * 600, "answer": "4"}], "verifier": "exact"}
    assert call("run", written(here, job(name="too-long", environment=wrong))) == 1
    capsys.readouterr()
    path = written(here, job(name="endless", environment={"hosted": "nobody"}))
    assert call("run", path, "--detach", "--json") == 0
    id = lines(capsys.readouterr().out)[-1]["job"]["id"]
    assert call("jobs", "cancel", id) == 0
    assert "endless is cancelled" in capsys.readouterr().out
    assert call("jobs", "logs", id, "-f") == 3


def test_wrong_job_file_is_refused_with_one_line_per_reason(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(here, job(stop={}, algorithm={"groupsize": 3}))
    for command in (("run", path), ("run", path, "--dry-run")):
        assert call(*command) == 2
        said = capsys.readouterr()
        assert said.out == "" and len(said.err.splitlines()) == 2
        assert "rookery: algorithm.groupsize: unknown field; did you mean group_size?" in said.err
    assert call("run", here / "nothing.yaml") == 2
    assert "nothing.yaml: cannot be read" in capsys.readouterr().err
    with pytest.raises(Exception, match="groupsize"):
        main(["run", str(path), "--debug"])


def test_run_dry_run_shows_the_job_and_three_prompts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", written(here, job(name="planned")), "--dry-run") == 0
    said = capsys.readouterr().out
    assert "groups_per_step: 2" in said and said.count("<|im_start|>assistant") == 3
    assert 'best constant reply: "4" earns 1.000 on 6 training prompts' in said
    assert call("jobs", "list") == 0
    assert "planned" not in capsys.readouterr().out


def test_an_evaluation_is_compared_with_the_best_constant_reply(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{number}?", "answer": answer} for number, answer in enumerate("aaaaab")]
    environment = {"id": "jsonl", "rows": rows, "eval_last": 2, "verifier": "exact"}
    path = written(here, job(name="compared", environment=environment, evaluation={"prompts": 2}))
    assert call("run", path) == 0
    said = capsys.readouterr().out
    assert said.count("version 2: 0.000 ± 0.000 on 2 held-out prompts; the best constant reply earns 0.500") == 1
    with Client() as client:
        submitted = client.job("compared")
        events = [event["text"] for event in submitted.events() if event["kind"] == "evaluation"]
        assert len(events) == 2 and all(text.endswith("; the best constant reply earns 0.500") for text in events)
        constants = [row.constant for row in submitted.evaluations()]
        assert constants == [{"reply": "a", "reward": 0.5, "prompts": 2}] * 2


def test_run_shows_warnings_and_steps_without_a_signal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = {"main": {"rank": 4, "targets": ["q"], "optimizer": {"schedule": {"name": "linear", "total_steps": 1}}}}
    rows = [{"prompt": f"{a}?", "answer": "never"} for a in range(8)]
    environment = {"id": "jsonl", "rows": rows, "verifier": "exact"}
    path = written(here, job(name="hardly-meant", policies=idle, environment=environment, stop={"steps": 4}))
    warning = "policies.main.optimizer.schedule.total_steps: 1: the rate is 0% of lr from step 2 of stop.steps 4"
    assert call("run", path, "--dry-run") == 0
    assert f"warning: {warning}" in capsys.readouterr().out
    assert call("run", path) == 0
    said = capsys.readouterr().out
    assert said.count(f"warning: {warning}") == 1
    assert said.count("no signal: steps 1 to 3: all rewards were equal within every group (mean reward 0)") == 1
    assert call("run", path, "--json") == 0
    events = [line["event"] for line in lines(capsys.readouterr().out) if "event" in line]
    assert [event["kind"] for event in events] == ["warning", "no_signal"]


def test_jobs_commands_list_show_and_control(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(here, job(name="steered", environment={"hosted": "nobody"}))
    assert call("run", path, "--detach") == 0
    assert "jobs logs -f" in capsys.readouterr().out
    assert call("jobs", "list", "--json") == 0
    views = {view["name"]: view for view in json.loads(capsys.readouterr().out)}
    assert views["steered"]["state"] in ("queued", "running")
    for command, state in (("pause", "paused"), ("resume", "queued"), ("pause", "paused"), ("cancel", "cancelled")):
        assert call("jobs", command, "steered", "--json") == 0
        found = json.loads(capsys.readouterr().out)["state"]
        assert found == state or (command == "resume" and found == "running")
    assert call("jobs", "show", "steered") == 0
    said = capsys.readouterr().out
    assert views["steered"]["id"] in said and "cancelled by its owner" in said
    assert call("jobs", "show", "steered", "--json") == 0
    assert json.loads(capsys.readouterr().out)["evaluations"] == []
    assert call("jobs", "logs", "steered") == 0
    assert "state: cancelled" in capsys.readouterr().out
    assert call("jobs", "delete", "steered") == 0
    assert capsys.readouterr().out == f"steered ({views['steered']['id']}) is deleted\n"
    assert call("jobs", "delete", "steered") == 2
    capsys.readouterr()
    assert call("jobs", "show", "nobody") == 2
    assert capsys.readouterr().err == "rookery: no job 'nobody'; rookery jobs list shows yours\n"


def test_a_name_that_is_nearly_another_is_suggested(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", written(here, job(name="phone-book", stop={"steps": 1}))) == 0
    assert call("tenants", "add", "phonetics") == 0
    capsys.readouterr()
    for command, line in (
        (("jobs", "show", "phonebook"), "no job 'phonebook'; did you mean phone-book? rookery jobs list shows yours"),
        (("jobs", "pause", "phone-bok~1"),
         "no job 'phone-bok~1'; did you mean phone-book? rookery jobs list shows yours"),
        (("adapters", "download", "Phone-book@1", here / "x"),
         "no job 'Phone-book'; did you mean phone-book? rookery jobs list shows yours"),
        (("jobs", "show", ""), "no job ''; rookery jobs list shows yours"),
        (("tenants", "keys", "phonetic"),
         "no tenant 'phonetic'; did you mean phonetics? rookery tenants list shows them"),
    ):  # fmt: skip
        assert call(*command) == 2
        assert capsys.readouterr().err == f"rookery: {line}\n"


@pytest.mark.parametrize("given", [{"arguments": ["-m", ""]}, {"arguments": ["-m", " "]}, {"stdin": "\n"}], ids=str)
def test_a_chat_without_a_message_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any]
) -> None:
    assert call("chat", MODEL, *given.get("arguments", ()), stdin=given.get("stdin")) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("rookery: no message: give one with --message")


class Checked(rookery.Environment):
    """The solver replies, then the verifier; each earns by the length of its reply."""

    deterministic = True

    def prompts(self, split: str) -> list[str]:
        return ["one", "two", "three"]

    def reset(self, prompt: Any, seed: int) -> rookery.Step:
        return rookery.Step(messages=[{"role": "user", "content": prompt}], policy="solver")

    def step(self, reply: rookery.Reply) -> rookery.Step:
        if reply.turn == 0:
            return rookery.Step(messages=[{"role": "user", "content": "Right?"}], policy="verifier")
        return rookery.Step(done=True, rewards={"solver": 1.0, "verifier": len(reply.text)})


def test_each_of_several_policies_has_its_figures_under_its_name(
    here: Path, service: EmbeddedService, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = job(name="pair", stop={"steps": 4}, evaluation={"prompts": 1})
    fields["policies"] = {"solver": {"rank": 4}, "verifier": {"rank": 2, "stop": {"steps": 3}}}
    del fields["environment"]
    with Client(service.url, service.key) as client:
        made = client.train(environment=Checked(), **fields)
        assert made.wait(60).state == "completed"
        rows, view, health = list(made.metrics(follow=False)), made.show(), made.health()
    last = {row.policy: row for row in rows}
    assert {policy.name: policy.step for policy in view.policies} == {"solver": 4, "verifier": 3}
    for policy in view.policies:
        row = last[policy.name]
        assert (policy.reward, policy.loss, policy.staleness) == (row.reward, row.loss, row.staleness_mean)
    assert ("dead reward", "solver") in {(alarm.name, alarm.policy) for alarm in health.alarms}
    assert call("jobs", "show", made.id) == 0
    said = capsys.readouterr().out
    assert re.search(r"policy solver +version 4, rank 4, alpha 8, step 4, reward 1\.000, loss ", said)
    for name in ("solver", "verifier"):
        assert f"evaluation of {name} version 0" in said and f"{name} {last[name].reward:.3f}" in said
    flat = {name: view.counters.get(f"zero_variance_groups/{name}", 0) for name in last}
    groups = fields["algorithm"]["groups_per_step"]
    assert flat["solver"] == 4 * groups and flat["verifier"] < 3 * groups, "the solver's reward is constant"
    assert view.counters.zero_variance_groups == sum(flat.values())
    whose = ", ".join(f"{name} {count}" for name, count in flat.items() if count)
    assert re.search(rf"zero variance groups +{sum(flat.values())} \({whose}\)\n", said)
    assert re.search(r"\nrewards of solver +▁+\n", said)
    assert call("jobs", "list") == 0
    assert re.search(r"pair +completed +7/7 +1\.000 \(solver\)", capsys.readouterr().out)
    assert call("jobs", "logs", made.id) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"step +{row.step}  {row.policy}  reward {row.reward:.4g}", said) for row in rows)
    (episode,) = made.episodes(limit=1)
    assert call("jobs", "episodes", made.id, "--id", episode.episode) == 0
    said = capsys.readouterr().out
    assert said.index("assistant (solver):") < said.index("assistant (verifier):")
    earned = len(episode.replies[1])
    assert said.startswith(f"{episode.episode}: reward of solver 1\n")
    assert f"→ reward of solver 1, reward of verifier {earned}, " in said
    (here / "file").write_text("")
    for command in ("jobs export", "jobs tensorboard", "adapters download"):
        for place in (here, here / "none" / "x.html") if command == "jobs export" else (here / "file",):
            assert call(*command.split(), made.id, place) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"rookery: {place}: ") and len(said.splitlines()) == 1, said
    assert call("jobs", "show", "\udcff") == 2
    assert call("chat", made.id, "-m", "\udcff") == 2
    assert "not Unicode" in capsys.readouterr().err
    assert call("jobs", "export", made.id, "report.html") == 0
    page = (here / "report.html").read_text(encoding="utf-8")
    for name in ("solver", "verifier"):
        assert f"<b>Reward of {name}</b>" in page and f"<b>Loss of {name}</b>" in page and f"<td>{name}</td>" in page


def test_run_waits_while_its_job_is_paused_by_its_owner(here: Path, service: EmbeddedService) -> None:
    path = written(here, job(name="waited-for", environment={"hosted": "nobody"}))
    process = started(here, "run", path)
    with Client(service.url, service.key) as client:
        views = waiting.until(lambda: [view for view in client.views() if view.name == "waited-for"])
        followed = client.job(views[0].id)
        for _ in range(2):
            followed.pause()
            until(process, "stdout", f"is paused: paused by its owner; waiting for: rookery jobs resume {followed.id}")
            assert followed.show().paused_by == "owner" and process.poll() is None
            followed.resume()
            until(process, "stdout", "waited-for is queued", "waited-for is running")
            assert followed.show().paused_by == ""
        followed.cancel()
    assert process.wait(60) == 3


def test_a_job_whose_stream_begins_with_a_heartbeat_is_followed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a service that is busy."""
    follow = Job.follow
    first = [("heartbeat", Record())]
    monkeypatch.setattr(Job, "follow", lambda one, after=-1: itertools.chain(first, follow(one, after)))
    assert call("run", written(here, job(name="slow"))) == 0
    assert call("jobs", "logs", "-f", "slow") == 0


def test_events_are_shown_as_they_come(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", written(here, job(name="eventful", evaluation={"prompts": 2}))) == 0
    out = capsys.readouterr().out
    assert "evaluation: version 0: mean reward" in out
    assert call("jobs", "logs", "eventful", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in found["metrics"]] == [1, 2] and found["events"][-1]["kind"] == "state"


def test_uploads_are_listed_and_deleted(
    service: EmbeddedService, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"X-API-Key": service.key}
    content = b'{"prompt": "5+5?", "answer": "10"}\n'
    digest = httpx.post(f"{service.url}/api/v1/datasets", content=content, headers=headers, timeout=60).json()[
        "dataset"
    ]
    assert call("uploads", "list") == 0
    assert f"{digest}  dataset" in capsys.readouterr().out
    assert call("uploads", "delete", digest, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"deleted": digest}
    assert call("uploads", "delete", digest) == 2
    assert capsys.readouterr().err == f"rookery: no upload {digest}; rookery uploads list shows yours\n"


def test_secrets_are_set_from_standard_input_listed_and_deleted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("secrets", "set", "board", stdin="very-secret\n") == 0
    assert call("secrets", "list") == 0
    assert call("secrets", "list", "--json") == 0
    assert call("secrets", "set", "board", stdin="\n") == 2
    assert call("secrets", "delete", "board") == 0
    assert call("secrets", "delete", "board") == 2
    shown = capsys.readouterr()
    assert "board is set" in shown.out and "very-secret" not in shown.out + shown.err
    assert "rookery: no secret on standard input" in shown.err and "rookery: no secret 'board'" in shown.err


@pytest.mark.parametrize("command", [("secrets", "set", "board"), ("chat", MODEL), ("chat", MODEL, "--json")])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_input_in_another_encoding_is_refused_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], encoding: str
) -> None:
    given = io.TextIOWrapper(io.BytesIO("Größe".encode("latin-1")), encoding=encoding)
    assert call(*command, stdin=given) == 2
    said = capsys.readouterr().err
    assert said == "rookery: a text is not Unicode: it has bytes that are no UTF-8; give it in UTF-8\n"


def test_a_job_is_written_for_tensorboard(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", written(here, job(name="boarded", evaluation={"prompts": 2}))) == 0
    for _ in range(2):
        assert call("jobs", "tensorboard", "boarded", "board") == 0
    [file] = (here / "board").iterdir()
    content, tags = file.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        tags.append(content[12 : 12 + length])
        content = content[16 + length :]
    assert b"brain.Event:2" in tags[0] and sum(b"evaluation/mean" in tag for tag in tags) == 2
    assert sum(b"\x06reward\x15" in tag for tag in tags) == 2 and str(file.name) in capsys.readouterr().out


def test_chat_with_a_job_a_version_and_a_base_model(
    here: Path, service: EmbeddedService, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(service.url, service.key) as client:
        talker = client.submit(job(name="talker", stop={"steps": 1}))
        talker.wait(30)
        assert "".join(client.stream(talker.id, "2+2?", seed=2)) == talker.sample("2+2?", seed=2).text == "4"
        with pytest.raises(NotFound, match="no job and no base model 'nobody'"):
            list(client.stream("nobody", "hello"))
    for target in ("talker", "talker@0", "talker~0", "talker~0@0", MODEL):
        assert call("chat", target, "-m", "2+2?", "--seed", 2) == 0
        assert capsys.readouterr().out == "4\n"
    for named, version in (("talker", 1), ("talker@0", 0), ("talker~0@1", 1), ("talker@latest", 1)):
        assert call("adapters", "download", named, here / f"{named}-folder") == 0
        assert "adapter_config.json, adapter_model.safetensors" in capsys.readouterr().out
        direct = talker.adapter(version).download(here / "direct") / "adapter_model.safetensors"
        assert (here / f"{named}-folder" / "adapter_model.safetensors").read_bytes() == direct.read_bytes()
    (here / "direct" / "notes").write_text("x")
    assert call("adapters", "download", "talker", here / "direct", "--json") == 0
    written_files = json.loads(capsys.readouterr().out)["files"]
    assert sorted([*written_files, "notes"]) == sorted(path.name for path in (here / "direct").iterdir())
    for wrong in ("talker@9", "talker@x", "talker@", "nobody"):
        assert call("adapters", "download", wrong, here / "none") == 2
    assert not (here / "none").exists()
    capsys.readouterr()
    with Client(service.url, service.key) as client:  # the first one is closed
        assert client.job("talker").id == talker.id
    assert call("chat", "talker", "-m", "2+2?", "--seed", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == "five"
    assert call("chat", "talker", "--seed", 2, stdin="2+2?\n") == 0
    assert capsys.readouterr().out == "4\n", "piped input is one message"
    assert call("chat", "talker", "--seed", 2, stdin=Typed("2+2?\nand now?\n\n")) == 0
    assert capsys.readouterr().out == "> 4\n> 4\n> "
    assert call("chat", "nobody", "-m", "hello") == 2


class Interrupted(Typed):
    """A terminal at which Ctrl-C is pressed."""

    def readline(self, size: int | None = -1, /) -> str:
        raise KeyboardInterrupt


def test_chat_that_is_interrupted_at_its_prompt_has_the_code_of_ctrl_c(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty line and Ctrl-D end it with 0. The prompt of the shell begins a line in either case."""
    for terminal, code in ((Interrupted(), 130), (Typed(""), 0)):
        assert call("chat", MODEL, stdin=terminal) == code
        assert capsys.readouterr().out == "> \n"


def test_workers_are_listed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("chat", MODEL, "-m", "hello") == 0  # the worker has connected
    capsys.readouterr()
    assert call("workers") == 0
    assert "serving" in capsys.readouterr().out
    assert call("workers", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    (row,), (pool,) = shown["workers"], shown["pools"]
    assert (row["state"], row["kind"], row["price"]) == ("serving", "reserved", 0)
    assert (pool["model"], pool["workers"]) == (row["model"], 1) and {"wanted", "least", "most"} <= pool.keys()


def test_models_and_doctor(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("models", "--json") == 0
    assert {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)}[MODEL] == "loaded"
    assert call("models") == 0
    assert "loaded" in capsys.readouterr().out
    call("doctor", "--json")
    found = {line["what"]: line for line in json.loads(capsys.readouterr().out)}
    assert found["service"]["state"] == "good" and found["cores"]["state"] == "good"
    for finding in found.values():
        assert finding["state"] != "bad" or finding["fix"]
        assert finding["found"], "every finding has a result"
    assert call("models", "--get", "no-such-model") == 2
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("DATABASE", "mysql://x"), ("JUDGES", "x"), ("SINKS", "x"), ("VERIFIERS", "/no/x"), ("GAMES", "/no/x"),
     ("PLAN", "/no/plan.yaml")],
)  # fmt: skip
def test_doctor_finds_settings_that_a_service_refuses(
    alone: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    assert call("serve", **{f"ROOKERY_{name}": value}) == 2
    refused = capsys.readouterr().err.strip().removeprefix("rookery: ")
    assert call("doctor", "--json", **{f"ROOKERY_{name}": value}) == 1
    assert refused in [line["found"] for line in json.loads(capsys.readouterr().out)]


@pytest.mark.heavy
def test_models_exports_the_published_layout(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("models", "--export", "made", ROOKERY_MODELS=save_small_model(alone / "small")) == 0
    assert "written to made" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (alone / "made").iterdir()}
    assert call("models", "--get", "./small", "--export", "made") == 2
    assert "exists; give a new folder" in capsys.readouterr().err


def test_every_setting_that_a_command_asks_its_client_for_was_read() -> None:
    """The settings of a client have defaults in all other fields, whatever the variables say."""
    sources = [path.read_text(encoding="utf-8") for path in (Path(rookery.__file__).parent / "cli").glob("*.py")]
    asked = {name for text in sources for name in re.findall(r"cli\.settings\.(?:server\.)?(\w+)", text)}
    assert asked and asked - {"server", "base_url"} <= set(CLIENT_SETTINGS)


def test_models_exports_the_first_of_the_setting(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("models", "--export", "made", ROOKERY_MODELS="./absent, other") == 2
    assert "./absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, problem",
    [
        (("--adapter", "made", "--detach"), "--adapter: the run is not followed to its end"),
        (("--adapter", "made", "--dry-run"), "--adapter: nothing runs"),
        (("--adapter", "job.yaml"), "--adapter: job.yaml cannot be written"),
        (("--new",), "--new is for a run without a service"),
    ],
)
def test_options_of_run_that_would_have_no_effect_are_refused_before_it(
    here: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], problem: str
) -> None:
    path = written(here, job(name="never"))
    assert call("run", path, *options) == 2
    assert problem in capsys.readouterr().err
    assert call("jobs", "list", "--json") == 0
    assert "never" not in capsys.readouterr().out


class Refusing(BaseHTTPRequestHandler):
    """A service whose limits this client has passed."""

    def do_GET(self) -> None:
        content = b'{"error": "too many requests"}'
        self.send_response(429)
        self.send_header("Retry-After", "60")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


def test_a_refusal_that_time_lifts_has_the_exit_code_of_a_failure(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert call("jobs", "list", ROOKERY_URL=f"http://127.0.0.1:{server.server_port}") == 1
        server.shutdown()
    assert capsys.readouterr().err == "rookery: too many requests\n"


def test_doctor_reports_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    hanging = tmp_path / "nvidia-smi"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    assert "does not answer within 0.1 s" in accelerator_finding(str(hanging), 0.1).found


def test_doctor_knows_every_extra() -> None:
    wanted = {re.findall(r'extra == "([\w-]+)"', need)[0] for need in requires("rookery") or [] if "extra ==" in need}
    assert set(EXTRAS) == wanted - {"test"}


def test_doctor_knows_bf16_instructions() -> None:
    assert bf16_finding({"avx512_bf16", "sse"}).state == "good"
    assert bf16_finding({"bf16", "asimd"}).found == "bf16"
    assert bf16_finding({"sse"}).state == "optional" and bf16_finding(None).state == "optional"


def test_doctor_reports_whether_the_kernels_run() -> None:
    flags = {"sse", "avx2", "fma"}
    assert kernels_finding(flags, "linux", True).found.startswith("AVX2")
    assert kernels_finding(flags | {"avx512f"}, "linux", True).found.startswith("AVX-512")
    assert "pip install numba" in kernels_finding(flags, "linux", False).fix
    for machine in ((flags, "darwin", True), ({"asimd"}, "linux", True), (None, "linux", True)):
        assert kernels_finding(*machine).state == "optional"


def test_paths_of_the_command_line_have_their_tilde_replaced(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone / "out").mkdir()
    for command in (("adapters", "export", "sums", "--merge=~/out"), ("adapters", "export", "sums", "--gguf=~/out"),
                    ("models", "--get", MODEL, "--export=~/out")):  # fmt: skip
        assert call(*command) == 2
        assert f"{alone / 'out'} exists" in capsys.readouterr().err
    written(alone, job())
    assert call("run", "~/job.yaml", "--adapter=~/new", "--detach") == 2
    assert call("run", "~/job.yaml", "--adapter=~/job.yaml") == 2
    assert f"{alone / 'job.yaml'} cannot be written" in capsys.readouterr().err
    assert not (alone / "~").exists()


@pytest.mark.parametrize(
    ("code", "error", "line"),
    [
        (2, UserError, "refused: x"),
        (1, RookeryError, "refused: x"),
        (-9, RookeryError, "signal 9 ended the task"),
    ],
)
def test_a_child_that_failed_for_now_is_no_refusal(code: int, error: type[RookeryError], line: str) -> None:
    with pytest.raises(RookeryError, match=line) as raised:
        check_child(subprocess.CompletedProcess([], code, "", "first\nrefused: x\n"), "the task")
    assert type(raised.value) is error
    check_child(subprocess.CompletedProcess([], 0, "", "a warning"), "the task")


def test_commands_without_a_service_fail_with_one_line(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (("jobs", "list"), ("chat", "x", "-m", "hello"), ("run", written(alone, job()), "--detach")):
        assert call(*command) == 1, "not a mistake of the user: a script may try again"
        error = capsys.readouterr().err
        assert error.startswith("rookery: ") and "rookery serve" in error and len(error.splitlines()) == 1
    assert call("models") == 0
    assert "prepared" in capsys.readouterr().out
    assert call("doctor", "--json") in (0, 1)
    assert '"service", "state": "optional"' in capsys.readouterr().out


def test_dry_run_without_a_service_leaves_no_files(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(alone.iterdir())
    path = written(alone, job())
    assert call("run", path, "--dry-run", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["prompts"]) == 3
    assert sorted(alone.iterdir()) == sorted([*before, path])


STANDING = {
    "DATABASE": "sqlite:////nowhere/rookery.db", "ARTIFACTS_URL": "ARTIFACTS", "ARTIFACTS_ENDPOINT": "http://127.0.0.1:9",
    "HOST": "192.0.2.1", "PORT": "9", "PUBLIC_URL": "https://rookery.example.org", "TLS_CERT": "/nowhere/cert.pem",
    "TLS_KEY": "/nowhere/key.pem", "CA_FILE": "/nowhere/cert.pem", "PLAN": "/nowhere/plan.json", "WORKERS": "0",
    "CLUSTER": "ray", "RAY_ADDRESS": "192.0.2.1:6379", "SCALE_MIN": "2", "SCALE_MAX": "4",
}  # fmt: skip
"""Variables of a service that stands elsewhere."""


def test_run_alone_uses_nothing_of_a_service_that_stands(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(alone, job())
    before = sorted(alone.iterdir())
    variables = {f"ROOKERY_{name}": value for name, value in STANDING.items()}
    variables["ROOKERY_ARTIFACTS_URL"] = str(alone / "artifacts")
    settings = Settings.alone(variables, data=alone / "data")
    assert settings.flat() == Settings.load({}, data=alone / "data").flat()
    for name in ("ROOKERY_TLS_CERT", "ROOKERY_CA_FILE"):  # the client of the default address reads these
        del variables[name]
    assert call("run", path, "--dry-run", "--json", **{**variables, "ROOKERY_HOST": "127.0.0.1"}) == 0
    assert len(json.loads(capsys.readouterr().out)["prompts"]) == 3
    assert sorted(alone.iterdir()) == before


def test_run_alone_leaves_the_data_folder_of_a_service_with_another_database(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (alone / "data").mkdir()
    (alone / "data" / "admin.key").write_text("tml-x")
    assert call("run", written(alone, job()), "--data", alone / "data") == 2
    assert "belongs to a service whose database is elsewhere" in capsys.readouterr().err
    assert [one.name for one in (alone / "data").iterdir()] == ["admin.key"]


def test_start_of_a_service_in_this_process_ends_when_it_is_interrupted(alone: Path) -> None:
    (alone / "data" / "artifacts").mkdir(parents=True)
    (alone / "data" / "artifacts" / "holder").write_text("another service")
    main, log, interrupted = threading.main_thread().ident, logging.getLogger("rookery.server"), list[float]()
    assert main is not None

    def interrupt() -> None:
        """As soon as the program waits for the start."""

        def waits() -> bool:
            within = sys._current_frames()[main].f_back
            return within is not None and within.f_code is Future.result.__code__

        waiting.until(waits)
        interrupted.append(time.monotonic())
        signal.pthread_kill(main, signal.SIGALRM)

    class Holding(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "another service used the artifacts" in record.getMessage():
                threading.Thread(target=interrupt).start()

    before, holding = signal.signal(signal.SIGALRM, signal.default_int_handler), Holding()
    log.addHandler(holding)
    try:
        with pytest.raises(KeyboardInterrupt), EmbeddedService(Settings.alone(data=alone / "data", port=0, models="")):
            pass
    finally:
        log.removeHandler(holding)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - interrupted[0] < HOLD_SECONDS / 2


def started(alone: Path, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Starts a command, with these variables beside those of the test, and with the default handlers of SIGINT, which a
    shell's background jobs do not have, and of SIGHUP, which ``nohup`` takes away."""

    def restore() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    command = [sys.executable, "-m", "rookery.cli", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=alone,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
        preexec_fn=restore,
    )


def ended(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    """Ends a command by a signal; returns its exit code and output. Checks that its child processes have ended."""
    running = psutil.Process(process.pid)
    children = waiting.until(lambda: running.children(recursive=True), "an environment host is a child process")
    process.send_signal(number)
    out, err = process.communicate(timeout=waiting.PATIENCE_SECONDS)
    assert psutil.wait_procs(children, timeout=waiting.PATIENCE_SECONDS)[1] == []
    return process.returncode, out + err


def until(process: subprocess.Popen[str], stream: str, *texts: str) -> None:
    """Reads a command's output up to a line with one of ``texts``."""
    said = []
    for line in getattr(process, stream):
        said.append(line)
        if any(text in line for text in texts):
            return
    pytest.fail(f"the output has no line with {texts!r}: {said}")


def at_a_terminal(folder: Path, *arguments: object) -> tuple[subprocess.Popen[bytes], int, int]:
    """A command at a terminal of 40 columns, with both ends of it."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 40))
    command = [sys.executable, "-m", "rookery.cli", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm"}
    return (
        subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=folder, env=environment),
        parent,
        child,
    )


@pytest.mark.parametrize("arguments", [("jobs", "logs", "-f", "watched"), ("top",)], ids=" ".join)
def test_a_command_that_is_ended_leaves_its_terminal_as_it_was(here: Path, arguments: tuple[str, ...]) -> None:
    assert call("run", written(here, job(name="watched", environment={"hosted": "nobody"})), "--detach") == 0
    process, parent, child = at_a_terminal(here, *arguments)
    before, shown = termios.tcgetattr(child), b""
    while b"watched" not in shown:
        shown += os.read(parent, 65536)
    process.send_signal(signal.SIGTERM)
    reader = threading.Thread(target=process.wait)
    reader.start()
    while select.select([parent], [], [], 0.2)[0] or reader.is_alive():
        if select.select([parent], [], [], 0)[0]:
            shown += os.read(parent, 65536)
    assert process.returncode == 130 and b"Traceback" not in shown
    for begun, over in ((b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?1049h", b"\x1b[?1049l")):  # cursor, whole screen
        assert shown.rfind(begun) <= shown.rfind(over)
    assert termios.tcgetattr(child) == before
    os.close(parent)
    os.close(child)


@pytest.mark.heavy
def test_interrupted_run_stops_cleanly_and_the_next_one_resumes(alone: Path) -> None:
    path = written(alone, job())
    ids = []
    for number, options in ((signal.SIGINT, []), (signal.SIGHUP, []), (signal.SIGTERM, ["--new"])):
        process = started(alone, "run", path, "--json", *options)
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())["job"]
        assert first["state"] in ("queued", "running")
        ids.append(first["id"])
        code, said = ended(process, number)
        assert code == 130 and "resumes from the last step" in said and "Traceback" not in said
    assert ids[0] == ids[1] != ids[2]
    (data,) = (alone / "runs").iterdir()
    assert data.name.startswith("sums-")


@pytest.mark.heavy
def test_run_of_an_edited_file_in_one_data_folder_is_refused(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started(alone, "run", written(alone, job()), "--json", "--data", alone / "data")
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())["job"]["id"]
    ended(process, signal.SIGINT)
    assert call("run", written(alone, job(stop={"steps": 3}, seed=1)), "--data", alone / "data") == 2
    assert f"job sums ({first}) of this data folder" in (err := capsys.readouterr().err)
    assert "differs from the file in stop, seed; --new ends it" in err
    process = started(alone, "run", written(alone, job()), "--data", alone / "data")
    until(process, "stdout", f"continues job sums ({first}) at step 0")
    ended(process, signal.SIGINT)


def test_serve_stops_on_sigterm(alone: Path) -> None:
    process = started(alone, "serve", "--port", 0, "--data", alone / "data", "--models", "")
    until(process, "stderr", "Rookery serves at http://127.0.0.1:")
    until(process, "stderr", "works: jobs, chat, the OpenAI API (http://127.0.0.1:")
    until(process, "stderr", "next, to get a worker: ROOKERY_TOKEN=$(cat ")
    until(process, "stderr", "offers")
    code, said = ended(process, signal.SIGTERM)
    assert code == 0 and "Traceback" not in said
    for line in (alone / "data" / "logs" / "service.jsonl").read_text().splitlines():
        assert {"time", "level", "room", "message"} <= json.loads(line).keys()


def test_a_second_signal_ends_a_stop_that_waits(alone: Path) -> None:
    """Its child takes no signal. Signals in the second after the first are copies of that, as a wrapper sends them. The
    first is Ctrl-C, and the second that of a terminal that closes."""
    serve = ("serve", "--port", 0, "--data", alone / "data", "--models", "")
    process = started(alone, *serve, ROOKERY_STOP_SECONDS="120")
    until(process, "stderr", "offers")
    [host] = psutil.Process(process.pid).children()
    host.suspend()
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:

        def interrupted() -> int | None:
            process.send_signal(signal.SIGHUP)
            return process.poll()

        assert waiting.until(interrupted, "it waits for its child") == 129
        assert 1.0 < time.monotonic() - began < 60
    finally:
        host.kill()
        process.communicate()


def test_unusable_data_folder_is_refused_with_one_line(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (alone / "file").write_text("")
    assert call("serve", "--port", 0, "--data", alone / "file" / "data") == 2
    assert "ROOKERY_DATA" in capsys.readouterr().err
    assert call("serve", "--port", 0, "--data", alone / "data", "--models", "nonsense") == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_start_that_can_succeed_later_is_no_refusal(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A unit that starts the service again after code 1 and not after code 2 survives a database that starts after it,
    and a mistake does not restart for ever."""
    start = ("serve", "--port", 0, "--data", alone / "data")
    (alone / "no.db").write_text("no database at all")
    for database, code in (("postgresql://rookery:secret@127.0.0.1:1/x", 1), (f"sqlite:///{alone}/no.db", 2)):
        assert call(*start, ROOKERY_DATABASE=database) == code
        said = capsys.readouterr().err
        assert "rookery: the service cannot start: the database does not answer (" in said.splitlines()[-1], said
        assert "Traceback" not in said and "secret" not in said
    for number in (*REFUSED_BY_DISK, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN):

        def unreadable(*arguments: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Artifacts, "inspect", unreadable)
        assert call(*start) == (2 if number in REFUSED_BY_DISK else 1)
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("rookery: the artifacts cannot be read: ") and os.strerror(number) in said


@pytest.mark.parametrize("space", ["\n", "\r", " \r\n"])
def test_white_space_around_variables_of_options_means_nothing(
    alone: Path, capsys: pytest.CaptureFixture[str], space: str
) -> None:
    """Of a file that was written on Windows."""
    reached = {"ROOKERY_URL": f"http://127.0.0.1:9{space}", "ROOKERY_KEY": f"tml-x{space}"}
    assert call("jobs", "list", **reached) == 1
    assert "no Rookery service answers at http://127.0.0.1:9;" in capsys.readouterr().err
    assert call("backup", alone / "backup", ROOKERY_DATA=f"{alone / 'data'}{space}", **reached) == 2
    assert f"{alone / 'data'} has no database" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [("--json", "jobs", "list"), ("jobs", "--key=x", "list"), ("--data", "x", "serve")]
)
def test_an_option_in_front_of_its_command_is_refused_with_its_place(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert call(*arguments) == 2
    option = next(one for one in arguments if one.startswith("--")).partition("=")[0]
    assert capsys.readouterr().err.startswith(f"rookery: {option}: it stands behind the command, as in rookery ")


@pytest.mark.parametrize("path", ["", "-"])
def test_no_path_is_empty_or_a_dash(alone: Path, capsys: pytest.CaptureFixture[str], path: str) -> None:
    for command in (("run", path), ("trace", path), ("jobs", "export", "sums", path), ("run", "x", "--adapter", path),
                    ("plan", "--jobs", path), ("backup", path), ("serve", "--data", path),
                    ("doctor", "--cache", path)):  # fmt: skip
        assert call(*command) == 2
        assert f"given '{path}', allowed:" in capsys.readouterr().err
    assert not (alone / "-").exists()


def test_a_key_that_no_header_can_hold_is_refused_in_one_line(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("tml-ü", "tml-\u201cx\u201d"):
        assert call("jobs", "list", "--url", "http://127.0.0.1:9", "--key", key) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("rookery: the API key has characters that no key has")


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("explode") == 2
    assert call("jobs", "show") == 2
    assert call("--version") == 0
    assert re.fullmatch(r"rookery \d+\.\d+.*\n", capsys.readouterr().out)
    assert call("--help") == 0
    assert "Exit codes" in capsys.readouterr().out


def test_tenants_keys_and_costs(here: Path, service: EmbeddedService, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("tenants", "add", "ada") == 0
    assert call("tenants", "key", "ada", "--expires", "soon") == 2 and "30d" in capsys.readouterr().err
    assert call("tenants", "key", "ada", "--role", "worker") == 2 and "administrator" in capsys.readouterr().err
    assert call("tenants", "key", "ada", "--label", "laptop", "--expires", "30d") == 0
    key = capsys.readouterr().out.splitlines()[-1]
    assert call("tenants", "keys", "ada", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["label"] == "laptop" and row["revoked"] is None and key not in str(row)
    assert row["role"] == "tenant" and row["expires"] - row["created"] == 30 * 86400
    assert call("jobs", "list", ROOKERY_KEY=key) == 0
    limit = ("tenants", "limit", "ada", "jobs=9")
    for refused in (("tenants", "list"), ("costs",), ("tenants", "revoke", "ada", row["id"]), limit):
        assert call(*refused, ROOKERY_KEY=key) == 2
    assert "administrator" in capsys.readouterr().err
    assert call("tenants", "limit", "ada", "jobs=3", "weight=2") == 0
    assert "ada: jobs 3*, waiting_jobs 1000, requests 4096, " in capsys.readouterr().out
    assert call("tenants", "list") == 0
    assert "jobs 3, weight 2" in " ".join(capsys.readouterr().out.split())
    assert call("tenants", "limit", "ada", "weight=default") == 0
    assert "jobs 3*" in (shown := capsys.readouterr().out) and "weight 1 " in shown
    assert call("tenants", "limit", "ada", "job=4") == 2
    assert "job: unknown field; did you mean jobs?" in capsys.readouterr().err
    number = "give NAME=NUMBER"
    refused_limits = {
        "jobs": number, "jobs=nan": number, "jobs=1e400": number, "jobs=0": "jobs", "size=3": "size",
        "weight=100": "weight",
    }  # fmt: skip
    for wrong, said in refused_limits.items():
        assert call("tenants", "limit", "ada", wrong) == 2
        assert said in (told := capsys.readouterr().err) and told.count("\n") == 1
    assert call("tenants", "revoke", "ada", row["id"]) == 0
    assert f"key {row['id']} (laptop) is revoked" in capsys.readouterr().out
    assert call("jobs", "list", ROOKERY_KEY=key) == 2
    assert call("tenants", "keys", "ada") == 0 and call("tenants", "list") == 0 and call("costs") == 0
    said = capsys.readouterr().out
    assert "laptop" in said and "ada" in said and "idle" in said
    assert call("tenants", "add", "ada") == 2
    assert "give another name" in capsys.readouterr().err
    assert call("tenants", "rename", "ada", "countess") == 0 and call("tenants", "rename", "ada", "x") == 2
    assert call("tenants", "delete", "countess", "--json") == 0
    assert call("tenants", "keys", "countess") == 2
    capsys.readouterr()
    assert call("tenants", "keys", "nobody") == 2
    assert "no tenant 'nobody'" in capsys.readouterr().err
    assert call("costs", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert "admin" in {row["name"] for row in told["tenants"]}


def test_empty_lists_are_a_sentence_and_an_empty_document(
    here: Path, service: EmbeddedService, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(service.url, service.key) as admin:
        admin.add_tenant("newcomer")
        key = admin.add_key("newcomer").key
    for command, line in (
        ("jobs list", "no jobs yet; rookery run job.yaml submits one\n"),
        ("uploads list", "no uploads yet; a job with a dataset or an adapter makes one\n"),
        ("secrets list", "no secrets yet; rookery secrets set NAME stores one\n"),
    ):
        assert call(*command.split(), ROOKERY_KEY=key) == 0 and capsys.readouterr().out == line
        assert call(*command.split(), "--json", ROOKERY_KEY=key) == 0 and capsys.readouterr().out == "[]\n"


def test_help_flows_and_names_arguments_in_capitals() -> None:
    for name, command in commands().items():
        assert command.help and "``" not in command.help, name
        assert not re.search(r"[^\n]\n[^\n]", command.help), f"{name}: a line is broken as in the source"
        for given in command.params:
            if given.param_type_name == "argument":
                assert given.metavar and given.metavar == given.metavar.upper(), f"{name}: {given.name}"


def test_every_command_that_prints_a_table_has_json() -> None:
    """The long-running ones and those that act on files print lines."""
    without = {name for name, command in commands().items() if "--json" not in options_of(command)}
    assert without == {"demo", "serve", "worker", "backup", "restore"}


def test_trace_is_written_to_a_file(here: Path, service: EmbeddedService, capsys: pytest.CaptureFixture[str]) -> None:
    with Client(service.url, service.key) as client:
        client.submit(job(name="traced")).wait()
    for arguments in (["all.json"], ["one.json", "--job", "traced", "--last", "5m"]):
        with pytest.raises(SystemExit) as end:
            main(["trace", *arguments])
        assert end.value.code == 0 and "open it at https://ui.perfetto.dev" in capsys.readouterr().out
        check(json.loads((here / arguments[0]).read_text()))
    for arguments, problem in (
        (["none/x.json"], "none/x.json: cannot be written (No such file or directory)"),
        (["x.json", "--last", "1y"], "--last: given 1y, allowed is a number with m, h or d"),
        (["x.json", "--last", "²m"], "--last: given ²m, allowed is a number with m, h or d"),
        (["x.json", "--job", "unknown"], "no job"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["trace", *arguments])
        assert end.value.code == 2 and problem in capsys.readouterr().err


def test_help_and_client_name_every_limit_of_a_tenant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tenants", "limit", "--help"])
    shown = capsys.readouterr().out
    for name in TenantLimits.model_fields:
        assert re.search(rf"\b{name}\b", shown) and re.search(rf"\b{name}\b", Client.limit_tenant.__doc__ or "")
