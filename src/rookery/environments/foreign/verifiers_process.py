"""The process that runs environments of verifiers 0.4, in the virtual environment that has that library.

:mod:`rookery.environments.foreign.verifiers` starts it, by the path of this file and isolated (``python -I``): it
imports the standard library and verifiers alone. It lists the tasks, starts ``serve_env`` in a separate process on a
socket in a private folder, and is the token face that the environment's rollouts call. Each call becomes a line of JSON
for the parent, whose answer goes back as it is, so token ids and log-probabilities are those of the service.

Lines to the parent: ``{"ready": …}``, ``{"call": …}``, ``{"ended": …}``. Lines from it: ``{"run": …}``,
``{"reply": …}``, ``{"cancel": …}``. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib
import itertools
import json
import multiprocessing
import os
import pkgutil
import queue
import re
import secrets
import sys
import tempfile
import threading
import types
import typing
from collections.abc import Collection, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "ROOKERY_TOKEN_FACE_KEY"
"""Variable with the key of the token face, which only this process's children know."""

EPISODE, ROLE = "rookery_episode", "rookery_role"
"""Further sampling parameters, by which a call names its episode and the role that makes it."""

START_SECONDS = 300.0
"""Longest start of the environment's server: it imports transformers."""

ROLE_KEYS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "timeout", "harness")

PLAIN = (bool, int, float, type(None))
"""Types whose values name nothing of this machine."""

CHOICE_FIELDS = re.compile(
    r"(?:\w+_)?(?:split|subset|category|categories|difficulty|difficulties|level|levels|topic|topics|subject|subjects"
    r"|language|languages|lang)"
)
"""Fields of text that jobs may set: they choose among the rows of a data set."""

CHOICE = re.compile(r"[\w .,+%:\[\]-]{0,200}")
"""The text of such a field, ``train[:100]`` for one: no path and no address is of these characters alone."""

SWITCHES = re.compile(
    r"(?i)(?:^|_)(?:url|path|dir|file|key|env|docker|provider|registry|repo|image|command|script|module|class|func|code"
    r"|port|host|remote|trust|secret)s?(?:_|$)"
)
"""Numbers and flags with such a word in their names are not taken either: they choose programs or addresses."""

EPISODE_ENDED = "the episode ended"

FACE_PATH = "/inference/v1/generate"


class Refused(Exception):
    """The job's options are wrong; one line."""


def plain_type(kind: Any, name: str) -> bool:
    """Whether each value of a type is a number, one of the choices that the package lists, or, in a field of that
    ``name``, a text."""
    if hasattr(kind, "__value__") and not isinstance(kind, type):  # type Name = …
        return plain_type(kind.__value__, name)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return True
    if origin is typing.Annotated:
        return plain_type(parts[0], name)
    if origin in (typing.Union, types.UnionType):
        return all(plain_type(part, name) for part in parts)
    if origin in (list, tuple, set, frozenset):
        return all(part is Ellipsis or plain_type(part, name) for part in parts)
    if kind is str:
        return CHOICE_FIELDS.fullmatch(name) is not None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return True
    return kind in PLAIN and not SWITCHES.search(name)


def is_choice(value: Any) -> bool:
    """Whether all texts in a value are such as choose rows of a data set."""
    if isinstance(value, (list, tuple)):
        return all(map(is_choice, value))
    if isinstance(value, dict):
        return False
    return not isinstance(value, str) or CHOICE.fullmatch(value) is not None


def check_taskset(kind: Any, given: dict[str, Any]) -> None:
    """Raises :class:`Refused` for fields of a taskset's configuration class that could name a file, a program, a
    function, an address or a key: by its type each field is known to be plain, or it is not taken."""
    fields = kind.model_fields
    known = {name for name, field in fields.items() if plain_type(field.annotation, name)}
    known -= {name for name, field in fields.items() if field.alias or field.validation_alias}
    for name, value in given.items():
        if name not in known:
            raise Refused(
                f"config.taskset.{name}: not taken from a job; allowed: {', '.join(sorted(known)) or 'no field'}, the"
                " fields of numbers, of listed choices, and of text that chooses rows"
            )
        if CHOICE_FIELDS.fullmatch(name) and not is_choice(value):
            raise Refused(f"config.taskset.{name}: allowed: a number, or a text of {CHOICE.pattern}")


def check_id(where: str, given: Any, known: Collection[str]) -> str:
    """An id of verifiers' own or of a package that the administrator lists, which alone are imported. Raises
    :class:`Refused`."""
    if not isinstance(given, str) or given.replace("-", "_") not in {name.replace("-", "_") for name in known}:
        raise Refused(f"{where}: allowed: {', '.join(sorted(known))}")
    return given


def config_of(package: str, packages: Collection[str], given: dict[str, Any]) -> Any:
    """The environment's configuration: that of the package with the job's ``given`` fields, of which only those are
    taken that name no file, program or address; ``packages`` are the administrator's."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    configs = importlib.import_module("verifiers.v1.configs.agent")
    environments = importlib.import_module("verifiers.v1.envs")
    taskset = given.pop("taskset", None) or {}
    if not isinstance(taskset, dict):
        raise Refused("config.taskset: give an object")
    check_taskset(loaders.taskset_config_type(package), taskset)
    env_id = given.pop("id", None) or ""
    if env_id:
        check_id("config.id", env_id, {*(one.name for one in pkgutil.iter_modules(environments.__path__)), *packages})
    data: dict[str, Any] = {"id": env_id, "taskset": {**taskset, "id": package}}
    for name in ("max_concurrent_agents",):
        if name in given:
            data[name] = given.pop(name)
    plain = loaders.resolve_env_config(data)
    roles = list(configs.agent_config_fields(plain))
    for role in roles:
        chosen = given.pop(role, None) or {}
        if not isinstance(chosen, dict):
            raise Refused(f"config.{role}: give an object")
        chosen = dict(chosen)
        unknown = [name for name in chosen if name not in ROLE_KEYS]
        if unknown:
            raise Refused(f"config.{role}.{unknown[0]}: allowed: {', '.join(ROLE_KEYS)}")
        harness = chosen.pop("harness", None) or {}
        if not isinstance(harness, dict) or harness.keys() - {"id"}:
            raise Refused(f"config.{role}.harness: give its id alone")
        if harness.get("id"):
            check_id(f"config.{role}.harness.id", harness["id"], {*loaders.builtin_harness_ids(), *packages})
        default = getattr(plain, role).harness
        chosen["harness"] = {"id": harness.get("id") or (default.id if default is not None else "null")}
        if loaders.harness_class(chosen["harness"]["id"]).EXECUTES_CODE:
            raise Refused(
                f"config.{role}.harness.id: {chosen['harness']['id']} runs a model's programs on the service's machine;"
                " give null, or another that runs none"
            )
        data[role] = {**chosen, "runtime": {"type": "subprocess"}, "sampling": {ROLE: role}}
    if given:
        raise Refused(f"config.{next(iter(given))}: allowed: id, taskset, max_concurrent_agents, {', '.join(roles)}")
    return loaders.resolve_env_config(data), roles


class Lines:
    """Lines of JSON to the parent, from any thread."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)  # what a library prints is no message

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()


class TokenFace(ThreadingHTTPServer):
    """``POST /inference/v1/generate`` on a loopback port, answered by the parent."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, lines: Lines, key: str) -> None:
        super().__init__(("127.0.0.1", 0), FaceHandler)
        self.lines, self.key = lines, key
        self.numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[int, queue.SimpleQueue[dict[str, Any]]]] = {}
        """Of the episodes that run, the calls that are not answered."""

    def begin(self, episode: str) -> None:
        with self._lock:
            self._waiting[episode] = {}

    def end(self, episode: str) -> None:
        """Its calls that are not answered get an error, and so do later ones: no thread waits for ever."""
        with self._lock:
            waiting = self._waiting.pop(episode, {})
        for number, answer in waiting.items():
            answer.put({"reply": number, "error": EPISODE_ENDED})

    def asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """The parent's answer to a call."""
        sampling = body.get("sampling_params") or {}
        number, episode = next(self.numbers), sampling.get(EPISODE)
        answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            waiting = self._waiting.get(str(episode))
            if waiting is None:
                return {"reply": number, "error": EPISODE_ENDED}
            waiting[number] = answer
        self.lines.send({"call": number, "episode": episode, "role": sampling.get(ROLE), "tokens": body["token_ids"]})
        return answer.get()

    def answer(self, message: dict[str, Any]) -> None:
        with self._lock:
            found = [calls.pop(message["reply"]) for calls in self._waiting.values() if message["reply"] in calls]
        for answer in found:
            answer.put(message)


class FaceHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TokenFace

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.respond(401, {"error": {"message": "wrong key"}})
        elif self.path != FACE_PATH:
            self.respond(404, {"error": {"message": f"only {FACE_PATH} is here"}})
        else:
            reply = self.server.asked(json.loads(body))
            if "error" in reply:
                self.respond(400, {"error": {"message": reply["error"], "type": "invalid_request_error"}})
                return
            scored = zip(reply["tokens"], reply["logprobs"], strict=True)
            content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in scored]
            choice = {
                "index": 0, "token_ids": reply["tokens"], "logprobs": {"content": content},
                "finish_reason": reply["finish"],
            }  # fmt: skip
            self.respond(200, {"request_id": f"call-{reply['reply']}", "choices": [choice]})

    def do_GET(self) -> None:
        self.respond(404, {"error": {"message": f"only {FACE_PATH} is here"}})

    def respond(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the caller is gone
            self.wfile.write(encoded)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def serve(config: dict[str, Any], address: str, death: Any) -> None:
    """The process of the environment's server."""
    importlib.import_module("verifiers.v1.serve").serve_env(
        config_data=config, max_workers=1, address=address, death_pipe=death
    )


class Runs:
    """The episodes that run."""

    def __init__(self, lines: Lines, client: Any, face: TokenFace, given: dict[str, Any]) -> None:
        sampling = importlib.import_module("verifiers.v1.types")
        clients = importlib.import_module("verifiers.v1.configs.client")
        self._lines, self._client, self._agent = lines, client, given["agent"]
        self._sampling = sampling.SamplingConfig
        self._face = face
        self._model = clients.TrainClientConfig(
            base_url=f"http://127.0.0.1:{face.server_port}/v1", api_key_var=KEY, renderer_model_name=given["tokenizer"]
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, episode: str, task: dict[str, Any]) -> None:
        self._face.begin(episode)
        self._tasks[episode] = asyncio.create_task(self._run(episode, task))

    def cancel(self, episode: str) -> None:
        self._face.end(episode)
        task = self._tasks.pop(episode, None)
        if task is not None:
            task.cancel()

    async def _run(self, episode: str, task: dict[str, Any]) -> None:
        try:
            ran = await self._client.run(self._model, "policy", self._sampling(**{EPISODE: episode}), task)
            self._lines.send({"ended": episode, **self._result(ran)})
        except Exception as error:  # an environment's own: it ends this episode alone
            self._lines.send({"ended": episode, "error": line(error)})
        finally:
            self._face.end(episode)
            self._tasks.pop(episode, None)

    def _result(self, ran: Any) -> dict[str, Any]:
        """The reward and metrics of an episode, and the tokens of its traces as the library recorded them."""
        mine = [trace for trace in ran.traces if getattr(trace.agent, "name", None) in (self._agent, None, "")]
        errors = [*ran.errors, *(error for trace in ran.traces for error in trace.errors)]
        if not mine or not ran.ok:
            reason = line(errors[0]) if errors else "the episode has no trace of its agent"
            return {"error": reason}
        metrics: dict[str, list[float]] = {}
        for trace in mine:
            given = {**trace.metrics, **{f"reward_{name}": one and one.value for name, one in trace.rewards.items()}}
            for name, value in given.items():
                if value is not None:
                    metrics.setdefault(str(name), []).append(float(value))
        means = {name: sum(values) / len(values) for name, values in metrics.items()}
        return {"reward": mean_reward(mine), "rewards": rewards_by_role(ran.traces), "metrics": means}


def mean_reward(traces: Collection[Any]) -> float:
    return sum(float(trace.reward) for trace in traces) / len(traces)


def rewards_by_role(traces: Iterable[Any]) -> dict[str, float]:
    """The mean reward of each role that the environment has rewarded."""
    rewarded: dict[str, list[Any]] = {}
    for trace in traces:
        role = getattr(trace.agent, "name", None)
        if role and any(one is not None for one in trace.rewards.values()):
            rewarded.setdefault(role, []).append(trace)
    return {role: mean_reward(mine) for role, mine in rewarded.items()}


def line(error: object) -> str:
    """An error in one line."""
    kind = type(error).__name__ if isinstance(error, BaseException) else ""
    text = " ".join(str(getattr(error, "message", None) or error).split())
    return f"{kind}: {text}"[:1000] if kind else text[:1000]


def tasks_of(config: Any, most: int) -> list[dict[str, Any]]:
    """The tasks as their environment's server takes them."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    taskset = loaders.load_taskset(config.taskset)
    return [task.data.model_dump(mode="json") for task in itertools.islice(iter(taskset), most)]


async def work(given: dict[str, Any], lines: Lines) -> None:
    module = importlib.import_module("verifiers.v1.serve")
    config, roles = config_of(given["package"], given["packages"], dict(given["config"]))
    agent = given.get("agent") or (roles[0] if len(roles) == 1 else "")
    if agent not in roles:
        raise Refused(f"agent: given {agent!r}, allowed: one of {', '.join(roles)}, whose replies are trained")
    given["agent"] = agent
    tasks = tasks_of(config, given["most"])
    if not tasks:
        raise Refused(f"package: {given['package']} has no tasks")
    key = os.environ[KEY] = secrets.token_hex(16)
    face = TokenFace(lines, key)
    threading.Thread(target=face.serve_forever, daemon=True).start()
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="rookery-verifiers-") as folder:
        address = f"ipc://{folder}/socket"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=serve, args=(module.env_config_data(config), address, theirs), daemon=False)
        server.start()
        theirs.close()
        client = module.EnvClient(address)
        try:
            starting = asyncio.create_task(client.wait_for_server_startup(timeout=START_SECONDS))
            while not starting.done():
                await asyncio.wait([starting], timeout=0.5)
                if not server.is_alive() and not starting.done():
                    starting.cancel()
                    raise Refused(f"package: the server of {given['package']} ended with {server.exitcode}")
            await starting
            runs = Runs(lines, client, face, given)
            lines.send({"ready": True, "roles": roles, "agent": agent, "tasks": tasks})
            reader = asyncio.StreamReader(limit=1 << 30)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            while text := await reader.readline():
                message = json.loads(text)
                if "run" in message:
                    runs.start(message["run"], message["task"])
                elif "reply" in message:
                    face.answer(message)
                elif "cancel" in message:
                    runs.cancel(message["cancel"])
        finally:
            ours.close()
            server.terminate()
            server.join(10)
            if server.is_alive():
                server.kill()


def main() -> None:
    lines = Lines()
    try:
        asyncio.run(work(json.loads(sys.argv[1]), lines))
    except Refused as refusal:
        lines.send({"refused": str(refusal)})
    except Exception as error:  # of the library or the package: the parent says it
        lines.send({"refused": line(error)})
    os._exit(0)  # threads of the token face may wait


if __name__ == "__main__":
    main()
