"""The client's connection: processes, pickles, proxies, silence, and where a wrong key is from."""

from __future__ import annotations

import copy
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from os import _exit as leave
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from tests.support import waiting
from tests.support.faces import MODEL, ThreadedWorker, job, served

from rookery.cli import main
from rookery.cli.doctor import service_findings
from rookery.client import Client, Job
from rookery.client import connection as limits
from rookery.errors import TooManyRequests, Unauthorized, Unavailable, UserError
from rookery.server.launcher import EmbeddedService
from rookery.settings import MAY_BE_EMPTY, SECTION_OF, Settings


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("connection")) as running, ThreadedWorker.of(running):
        yield running


# --- processes --------------------------------------------------------------------------------------------------------


class Echo(BaseHTTPRequestHandler):
    """Returns the path, slowly enough that the responses of several processes overlap."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(0.002)
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *about: object) -> None:
        pass


class Busy(Echo):
    """Refuses requests until ``left`` is used up, and names a wait."""

    left, wait = 0, "0"

    def do_GET(self) -> None:
        if not Busy.left:
            super().do_GET()
            return
        Busy.left -= 1
        self.send_response(429)
        self.send_header("Retry-After", Busy.wait)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.do_GET()


@pytest.mark.parametrize(
    ("method", "refusals", "wait", "asked"),
    [("GET", 4, "0", 4), ("GET", 9, "0", 5), ("GET", 9, "60", 1), ("POST", 9, "0", 1)],
)
def test_a_read_that_is_refused_for_a_moment_is_sent_again(method: str, refusals: int, wait: str, asked: int) -> None:
    """A longer wait, and a change, are the caller's to repeat."""
    Busy.left, Busy.wait = refusals, wait
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = limits.HttpConnection(f"http://127.0.0.1:{server.server_address[1]}", "key")
        try:
            assert connection.call(method, "/path").path == "/path" and refusals < 5
        except TooManyRequests:
            assert refusals > 4
        assert refusals - Busy.left == asked
        connection.close()
        server.shutdown()


def misread(connection: limits.HttpConnection, number: int) -> int:
    """How many of the responses to this process are another one's."""
    return sum(connection.call("GET", path).path != path for path in (f"/{number}/{i}" for i in range(40)))


def test_forked_processes_read_only_responses_to_their_requests() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = limits.HttpConnection(f"http://127.0.0.1:{server.server_port}", "tml-x")
        assert connection.call("GET", "/before").path == "/before"
        children = []
        for number in range(1, 5):
            if not (child := os.fork()):
                code = 99
                try:
                    code = misread(connection, number)
                    connection.close()
                finally:
                    leave(code)
            children.append(child)
        assert misread(connection, 0) == 0
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
        assert connection.call("GET", "/after").path == "/after"
        connection.close()
        server.shutdown()


def test_clients_and_jobs_are_pickled_and_copied_as_their_address(service: EmbeddedService, tmp_path: Path) -> None:
    with Client(service.url, service.key) as client:
        submitted = client.submit(job(name="pickled", environment={"hosted": "nobody"}))
        for clone in (lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy):
            other, again, view = clone(client), clone(submitted), clone(submitted.show())
            assert isinstance(other, Client) and isinstance(again, Job)
            assert other.url == client.url and other.job("pickled").id == again.id == again.show().id == view.id
            assert clone(submitted.adapter()) is not None
            other.close()
        assert client.job("pickled").show().id == submitted.id, "the copy's end is not the client's"
        (tmp_path / "job").write_bytes(pickle.dumps(submitted))
        code = f"import pickle; print(pickle.load(open({str(tmp_path / 'job')!r}, 'rb')).show().id)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == submitted.id, done.stderr
        submitted.cancel()


# --- keys and settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_an_empty_key_or_address_is_a_mistake_wherever_it_is_given(
    service: EmbeddedService, capsys: pytest.CaptureFixture[str], blank: str
) -> None:
    data = service.settings.data
    for given in ({"url": service.url, "key": blank}, {"url": blank, "key": service.key}):
        with pytest.raises(UserError, match=r"(key|url): it is empty"):
            Client(**given)
    variables = {"ROOKERY_DATA": str(data), "ROOKERY_URL": service.url}
    for name in ("ROOKERY_KEY", "ROOKERY_URL", "ROOKERY_DATA"):
        with patch.dict(os.environ, {**variables, name: blank}), pytest.raises(SystemExit) as ended:
            main(["jobs", "list"])
        assert ended.value.code == 2
        assert f"setting {name}: it is empty" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["jobs", "list", "--key", blank])
    assert ended.value.code == 2 and "ROOKERY_KEY" in capsys.readouterr().err


def test_no_text_setting_may_be_empty_unless_that_is_a_choice() -> None:
    texts = [name for name, value in Settings().flat().items() if isinstance(value, str | Path)]
    assert {"key", "url", "data", "host", "tls_cert"} <= {*texts}
    for name in texts:
        if name in MAY_BE_EMPTY:
            assert Settings.load({f"ROOKERY_{name.upper()}": ""}).flat()[name] == ""
        else:
            with pytest.raises(UserError, match=f"setting ROOKERY_{name.upper()}: it is empty"):
                Settings.load({f"ROOKERY_{name.upper()}": ""})
    assert {*MAY_BE_EMPTY} <= {*SECTION_OF}


def test_a_wrong_key_is_named_with_its_source(service: EmbeddedService, tmp_path: Path) -> None:
    with Client(service.url, service.key) as admin:
        admin.add_tenant("grace")
        revoked, expires = admin.add_key("grace", "old").key, admin.add_key("grace", lifetime_seconds=0.01)
        (row,) = [row for row in admin.keys("grace") if row.label == "old"]
        admin.revoke_key("grace", row.id)
    waiting.until(lambda: time.time() > expires.expires)
    wrong = {revoked: "the API key 'old' was revoked", expires.key: "the API key expired on", "tml-x": "is unknown"}
    for key, said in wrong.items():
        with Client(service.url, key) as client, pytest.raises(Unauthorized, match=f"{said}.*the argument key"):
            client.views()
        with (
            patch.dict(os.environ, ROOKERY_KEY=key), Client(service.url) as client,
            pytest.raises(Unauthorized, match=f"{said}.*ROOKERY_KEY") as caught,
        ):  # fmt: skip
            list(client.stream(MODEL, "hello"))
        assert key not in str(caught.value)
    (tmp_path / "admin.key").write_text("tml-of-another-service\n")
    other = Client(settings=Settings.load({}, url=service.url, data=tmp_path))
    with other as client, pytest.raises(Unauthorized, match=r"admin\.key"):
        client.views()


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_silent_service_holds_a_list_for_the_time_limit_of_a_list(
    silent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert limits.READ_SECONDS <= 10 and 3 * limits.CONNECT_SECONDS < limits.READ_SECONDS
    monkeypatch.setattr(limits, "READ_SECONDS", 0.3)
    with Client(silent, "tml-x") as client:
        begun = time.monotonic()
        for read in (client.views, client.models, client.health, lambda: client.job("x")):
            with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
                read()
        assert time.monotonic() - begun < 60
    with Client(silent, "tml-x", seconds=0.2) as patient:
        for ask in (
            lambda: patient.sample(MODEL, "hello"),
            lambda: next(patient.stream(MODEL, "hello")),
            lambda: patient.trace(tmp_path / "trace"),
            lambda: next(iter(patient.uploads())),
        ):
            with pytest.raises(Unavailable, match=r"within 0\.2 s"):
                ask()
    (found,) = service_findings(Settings.load({"ROOKERY_URL": silent, "ROOKERY_KEY": "tml-x"}), 0.2)
    assert found.what == "service" and "did not answer within 0.2 s" in found.found


# --- waits that no library limits -------------------------------------------------------------------------------------


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that answers each connection in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=talk, args=listening.accept()[:1], daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


HINT = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n[]"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def empty_list(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(OK)


def without_end(first: bytes, again: bytes) -> Callable[[socket.socket], None]:
    """Sends one text, and then another one again and again."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(first)
        while True:
            connection.sendall(again)
            time.sleep(0.02)

    return answer


@pytest.mark.parametrize(
    ("answer", "ask"),
    [
        (without_end(HINT, HINT), lambda client: client.views()),
        (without_end(b"", HINT * 100), lambda client: client.views()),
        (without_end(HINT[:20], b"x"), lambda client: client.views()),
        (without_end(OK[:-2], b""), lambda client: client.views()),
        (without_end(HINT, HINT), lambda client: list(client.stream(MODEL, "hello"))),
        (without_end(EVENTS, b"x"), lambda client: list(client.stream(MODEL, "hello"))),
    ],
    ids=["hints", "many hints", "a head byte by byte", "no body", "hints before a stream", "a stream without events"],
)  # fmt: skip
def test_every_wait_of_a_request_ends(answer: Callable[[socket.socket], None], ask: Callable[[Client], object]) -> None:
    """A library limits each silence: there is none here."""
    with answering(answer) as url, Client(url, "tml-x", seconds=0.3) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"did not answer within 0\.3 s"):
            ask(client)
        assert time.monotonic() - began < 60


def test_a_response_after_some_of_the_class_1xx_is_read() -> None:
    def answer(connection: socket.socket) -> None:
        for number in range(3):
            connection.recv(1 << 16)
            connection.sendall(HINT * number)
            connection.sendall(OK)

    with answering(answer) as url, Client(url, "tml-x") as client:
        assert [client.views() for _ in range(3)] == [[], [], []]


def test_a_name_server_that_does_not_answer_is_waited_for_as_long_as_for_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(limits.socket, "getaddrinfo", lambda *_, **__: ended.wait())
    monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.1)
    with Client("http://service.example", "tml-x") as client:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"no address of the name in http://service\.example came within 0\.1 s"):
            client.views()
        assert time.monotonic() - began < 60
    ended.set()


@pytest.mark.parametrize("lost", [1, 24])
def test_addresses_that_lead_nowhere_share_the_time_to_connect(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a name are tried, and all together end in time. No queue of connections is longer than one."""
    with answering(empty_list) as url, ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for number in range(2, lost + 2):
            full = stack.enter_context(socket.socket())
            full.bind((f"127.0.0.{number}", port))
            full.listen(0)
            for _ in range(4):
                waiting_one = stack.enter_context(socket.socket())
                waiting_one.setblocking(False)
                waiting_one.connect_ex((f"127.0.0.{number}", port))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in range(2, lost + 2)]
        look_up = socket.getaddrinfo

        def addresses(host: Any, *given: Any, **more: Any) -> Any:
            return found if host == "service.example" else look_up(host, *given, **more)

        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        monkeypatch.setattr(limits, "CONNECT_SECONDS", 0.4)
        with Client(f"http://service.example:{port}", "tml-x") as client:
            began = time.monotonic()
            with pytest.raises(Unavailable, match="no Rookery service answers"):
                client.views()
            assert time.monotonic() - began < 20, "each with all of the time would take 29 s"
            found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)))
            assert client.views() == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e7, "5"])
def test_seconds_that_are_no_time_limit_are_refused(seconds: float) -> None:
    with pytest.raises(UserError, match=r"^seconds: given .* allowed: a number above 0, at most 1,000,000"):
        Client("http://127.0.0.1:9", "tml-x", seconds=seconds)


# --- proxies ----------------------------------------------------------------------------------------------------------


class Proxy(BaseHTTPRequestHandler):
    """Forwards plain requests, and counts all of them."""

    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        headers = {"X-API-Key": self.headers["Authorization"].split()[-1]}
        answer = httpx.get(self.path, headers=headers, trust_env=False, timeout=60)
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def do_CONNECT(self) -> None:
        self.seen.append(self.path)
        self.send_error(403)

    def log_message(self, *about: object) -> None:
        pass


def test_the_client_uses_the_proxy_of_its_address_and_none_for_this_machine(service: EmbeddedService) -> None:
    Proxy.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        named = service.url.replace("127.0.0.1", "0.0.0.0")  # this machine by an address that is not the loopback's
        with patch.dict(os.environ, http_proxy=f"http://127.0.0.1:{server.server_port}", NO_PROXY="10.0.0.0/8,::1/128"):
            with Client(service.url, service.key) as client:
                assert client.views() is not None and Proxy.seen == []
            with Client(named, service.key) as client:
                assert client.health() and Proxy.seen == [f"{named}/healthz"]
            os.environ["NO_PROXY"] = "0.0.0.0/32,::1/128"
            with Client(named, service.key) as client:
                assert client.health() and len(Proxy.seen) == 1
        server.shutdown()


@pytest.mark.parametrize("command", [("jobs", "list"), ("worker", "--connect", "http://far.example:7077")])
def test_a_proxy_that_cannot_be_used_ends_every_command_with_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    variables = {
        "ALL_PROXY": "socks5://127.0.0.1:1080",
        "ROOKERY_URL": "http://far.example:7077",
        "HOME": str(tmp_path),
    }
    keys = {"ROOKERY_KEY": "tml-x", "ROOKERY_TOKEN": "tml-x", "ROOKERY_CACHE": str(tmp_path)}
    plain = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    code = "from rookery.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True, text=True, timeout=120, env={**plain, **variables, **keys},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "ALL_PROXY: given 'socks5://127.0.0.1:1080'" in done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 2
