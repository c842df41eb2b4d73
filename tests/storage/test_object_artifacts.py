"""Artifacts in an object store: the library's own store in memory, and S3 by moto's server (``make test-s3``)."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore, ObjectStore
from tests.storage.test_artifacts import contents, store
from tests.support.draws import examples
from tests.support.faces import ThreadedWorker, job, served, tokenizer
from tests.support.ports import free_port
from tests.support.s3 import s3

from rookery.client import Client
from rookery.errors import CorruptArtifact, NotFound, RookeryError, Unavailable, UserError
from rookery.protocol import Shard
from rookery.storage.artifacts import Artifacts
from rookery.storage.object_artifacts import ENDPOINT_VARIABLES, ObjectArtifacts, open_store
from rookery.storage.place import Owner, StoreRules

MOTO = Path(".bench/moto/bin/moto_server")
LARGE = 24 << 20
"""Bytes that are sent in parts."""

Opener = Callable[..., ObjectArtifacts]


@contextmanager
def moto() -> Iterator[str]:
    """The address of an S3 server with the bucket ``rookery``."""
    port = free_port()
    server = subprocess.Popen([MOTO, "-p", str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert server.stdout is not None
        while b"Running on" not in server.stdout.readline():
            assert server.poll() is None
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("PUT", "/rookery")
        assert connection.getresponse().status == 200
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.heavy)])
def opened(request: pytest.FixtureRequest, tmp_path: Path, s3_keys: None) -> Iterator[Opener]:
    """Opens the same empty store again and again, for one owner or another."""
    if request.param == "memory":
        yield opener(MemoryStore(), tmp_path / "spool")
        return
    with moto() as endpoint:
        yield opener(open_store(f"s3://rookery/{uuid.uuid4().hex}/more", endpoint), tmp_path / "spool")


def opener(objects: ObjectStore, spool: Path) -> Opener:
    def opened(owner: str = "owner") -> ObjectArtifacts:
        artifacts = ObjectArtifacts(objects, "memory:///", spool)
        artifacts.claim(Owner(f"sqlite:///{owner}", owner, named=frozenset()))
        return artifacts

    return opened


@settings(max_examples=examples(30))
@given(files=contents, data=st.data())
def test_written_content_is_read_unchanged_from_any_offset(files: dict[str, list[bytes]], data: st.DataObject) -> None:
    artifacts = opener(MemoryStore(), Path(os.environ.get("TMPDIR", "/tmp")) / f"rookery-{uuid.uuid4().hex}")()
    try:
        manifest = store(artifacts, {name: b"".join(chunks) for name, chunks in files.items()})
        assert artifacts.verify(manifest.hash) == artifacts.open(manifest.hash) == manifest
        assert artifacts.hashes() == {manifest.hash}
        for shard in manifest.shards:
            content, start = b"".join(files[shard.name]), data.draw(st.integers(0, shard.size))
            with artifacts.reading(manifest.hash, shard, start) as chunks:
                assert b"".join(chunks) == content[start:]
        artifacts.delete(manifest.hash)
        assert artifacts.hashes() == set()
    finally:
        shutil.rmtree(artifacts.root)


def test_only_whole_artifacts_are_visible_and_a_damaged_one_is_mended(opened: Opener) -> None:
    artifacts, files = opened(), {"a.bin": b"a" * 1000, "b.json": b"{}"}
    manifest = store(artifacts, files)
    objects = artifacts._store
    for damage, error in (
        (lambda: obstore.put(objects, f"{manifest.hash}/a.bin", b"short"), "does not have 1000 bytes"),
        (lambda: obstore.delete(objects, f"{manifest.hash}/b.json"), "does not have 2 bytes"),
        (lambda: obstore.put(objects, f"{manifest.hash}/manifest.json", b"{"), "cannot be read"),
    ):
        damage()
        with pytest.raises(CorruptArtifact, match=error):
            artifacts.open(manifest.hash)
        assert store(artifacts, files) == manifest
        assert artifacts.verify(manifest.hash) == manifest
    obstore.put(objects, f"{manifest.hash}/a.bin", b"b" * 1000)
    with pytest.raises(CorruptArtifact, match="does not have the hash"):
        artifacts.verify(manifest.hash)
    obstore.delete(objects, f"{manifest.hash}/manifest.json")
    for call in (artifacts.open, artifacts.verify):
        with pytest.raises(NotFound):
            call(manifest.hash)
    assert artifacts.prune([]) == [manifest.hash]
    assert [found["path"] for found in obstore.list(objects).collect()] == ["owner"]


def test_the_same_content_from_many_writers_is_one_artifact(opened: Opener) -> None:
    artifacts, found = opened(), set()
    threads = [threading.Thread(target=lambda: found.add(store(opened(), {"a": b"same"}).hash)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert artifacts.hashes() == found and len(found) == 1
    artifacts.verify(*found)
    assert list((artifacts.root / ".staging").iterdir()) == []


def test_a_place_belongs_to_one_database(opened: Opener) -> None:
    opened("one")
    opened("one")
    with pytest.raises(UserError, match=r"memory:/// belong to another database than sqlite:///two; give"):
        opened("two")


def test_a_large_file_is_never_held_whole(opened: Opener, tmp_path: Path) -> None:
    artifacts = opened()
    with artifacts.begin() as staging:
        shard = staging.write("large", (bytes([number % 251]) * (1 << 20) for number in range(LARGE >> 20)))
        manifest = staging.commit()
    copies = Artifacts(tmp_path / "copies")
    artifacts.link(manifest.hash, copies.root / manifest.hash)
    assert copies.verify(manifest.hash) == manifest
    if not isinstance(artifacts._store, MemoryStore):  # it gives a whole file at once
        with artifacts.reading(manifest.hash, shard) as chunks:
            assert max(map(len, chunks)) <= LARGE // 4


class Refusing(BaseHTTPRequestHandler):
    """A store that answers all requests with ``status``; with ``lists_only`` it has no object, and lists none."""

    status, lists_only = 403, False

    def do_PUT(self) -> None:
        self.send_response(404 if self.lists_only and "list-type" not in self.path else self.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.mark.parametrize("lists_only", [False, True])
@pytest.mark.parametrize(
    ("status", "kind", "match"),
    [
        (301, UserError, "cannot be used: .* region"),
        (400, UserError, "cannot be used: .* 400"),
        (401, UserError, "permission denied; set AWS_"),
        (403, UserError, "permission denied; set AWS_"),
        (404, UserError, "no such bucket"),
        (429, Unavailable, "cannot be used now: .* 429"),
        (503, Unavailable, "cannot be used now: .* 503"),
    ],
)
def test_a_store_that_refuses_at_a_start_is_a_mistake_or_may_answer_later(
    status: int, kind: type[RookeryError], match: str, lists_only: bool, tmp_path: Path, s3_keys: None
) -> None:
    refusing = type("Refusing", (Refusing,), {"status": status, "lists_only": lists_only})
    with ThreadingHTTPServer(("127.0.0.1", 0), refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            with pytest.raises(kind, match=match) as refused:
                place = {"artifacts_url": "s3://bucket/prefix", "artifacts_endpoint": endpoint}
                served(tmp_path, store_retries=0, **place).__enter__()
        finally:
            server.shutdown()
            thread.join()
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("mode", "kind", "match"),
    [
        ("clock", Unavailable, "now: this machine's clock differs from that of the store, RequestTimeTooSkewed"),
        ("idle", Unavailable, "cannot be used now: RequestTimeout"),
        ("slow down", Unavailable, "cannot be used now: "),
        ("denied", UserError, "permission denied; set AWS_"),
        ("expired", UserError, "permission denied; set AWS_"),
    ],
)
def test_a_refusal_that_may_pass_is_no_mistake_of_any_status(
    mode: str, kind: type[RookeryError], match: str, tmp_path: Path, s3_keys: None
) -> None:
    with s3() as bucket:
        bucket.mode = mode
        artifacts = ObjectArtifacts.at("s3://rookery/place", bucket.endpoint, tmp_path, StoreRules(retries=0))
        with pytest.raises(kind, match=match) as refused:
            artifacts.claim(Owner("sqlite:///a", "a", named=frozenset()))
        assert len(str(refused.value).splitlines()) == 1
        bucket.mode = "ok"
        artifacts.claim(Owner("sqlite:///a", "a", named=frozenset()))


@pytest.mark.parametrize("variable", ENDPOINT_VARIABLES)
def test_the_endpoint_of_other_programs_is_used(variable: str, monkeypatch: pytest.MonkeyPatch, s3_keys: None) -> None:
    with s3() as there, s3() as elsewhere:
        monkeypatch.setenv(variable, there.endpoint)
        obstore.put(open_store("s3://bucket/prefix"), "a", b"1")
        obstore.put(open_store("s3://bucket/prefix", elsewhere.endpoint), "b", b"2")
        assert there.objects == {"bucket/prefix/a": b"1"} and elsewhere.objects == {"bucket/prefix/b": b"2"}


@pytest.mark.parametrize(
    ("host", "no_proxy", "through"),
    [
        ("127.0.0.1", "", False), ("localhost", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "0.0.0.0:{port}", False),
        ("0.0.0.0", "0.0.0.0:1", True), ("0.0.0.0", "0.0.0.0/8", False), ("0.0.0.0", "*", False),
    ],
)  # fmt: skip
def test_a_store_is_reached_by_the_rule_of_all_processes(
    host: str, no_proxy: str, through: bool, monkeypatch: pytest.MonkeyPatch, s3_keys: None
) -> None:
    with s3() as there, s3() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.endpoint)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, no_proxy.format(port=there.endpoint.rpartition(":")[2]))
        obstore.put(open_store("s3://bucket/prefix", there.endpoint.replace("127.0.0.1", host)), "a", b"1")
        used, unused = (proxy, there) if through else (there, proxy)
        assert used.objects == {"bucket/prefix/a": b"1"} and unused.objects == {}


def test_a_file_that_is_asked_for_is_copied_alone_by_several_threads(opened: Opener) -> None:
    artifacts = opened()
    manifest = store(artifacts, {"a.bin": b"a" * 5000, "b.json": b"{}"})
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: artifacts.path(manifest.hash, "b.json"), range(32)))
    [path] = paths
    assert path.read_bytes() == b"{}" and [file.name for file in path.parent.iterdir()] == ["b.json"]
    assert artifacts.path(manifest.hash, "a.bin").parent == path.parent
    artifacts.delete(manifest.hash)
    assert not path.exists()


def test_commits_wait_for_no_dataset_that_arrives_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with that dataset is submitted while another tenant's job trains."""
    arrive, asked = threading.Event(), threading.Event()
    real = ObjectArtifacts.path

    def slow(artifacts: ObjectArtifacts, hash: str, shard: str) -> Path:
        if not asked.is_set():
            asked.set()
            assert arrive.wait(60)
        return real(artifacts, hash, shard)

    with (
        served(tmp_path, artifacts_url="memory:///") as service,
        Client(service.url, service.key) as client,
        ThreadedWorker(service.url, (tmp_path / "data" / "worker.token").read_text().strip(), tokenizer(tmp_path)),
        ThreadPoolExecutor(1) as pool,
    ):
        other = Client(service.url, str(client.add_key(client.add_tenant("other").id).key))
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"prompt": "1+1?", "answer": "2"}\n' * 8)
        monkeypatch.setattr(ObjectArtifacts, "path", slow)
        given = {"id": "jsonl", "path": str(rows), "verifier": "exact"}
        submitted = pool.submit(other.submit, job(environment=given, stop={"steps": 1}))
        assert asked.wait(60)
        trained = client.submit(job(stop={"steps": 3}))
        trained.wait(60)
        assert trained.show().step == 3 and not submitted.done()
        arrive.set()
        submitted.result(60).wait(60)


@pytest.mark.parametrize("url", ["s3://", "nowhere://bucket"])
def test_a_url_of_no_store_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give one like s3://bucket/prefix"):
        served(tmp_path, artifacts_url=url).__enter__()


def test_a_store_that_does_not_answer_is_unavailable(tmp_path: Path, s3_keys: None) -> None:
    store = open_store("s3://bucket", f"http://127.0.0.1:{free_port()}", StoreRules(retries=0))
    artifacts = ObjectArtifacts(store, "s3://bucket", tmp_path)
    with pytest.raises(Unavailable, match="do not answer"):
        artifacts.hashes()


@pytest.mark.parametrize("call", ["hashes", "open", "reading"])
def test_a_store_that_takes_a_connection_and_is_silent_is_unavailable_soon(
    call: str, tmp_path: Path, s3_keys: None
) -> None:
    rules = StoreRules(retries=0, small=0.2, silent=0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        artifacts = ObjectArtifacts.at("s3://bucket", f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, rules)
        with pytest.raises(Unavailable, match="do not answer"):
            match call:
                case "hashes":
                    artifacts.hashes()
                case "open":
                    artifacts.open("0" * 64)
                case "reading":
                    with artifacts.reading("0" * 64, Shard(name="a.bin", size=4, sha256="")) as chunks:
                        b"".join(chunks)


@pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=pytest.mark.heavy)])
def test_a_service_keeps_its_artifacts_there(place: str, tmp_path: Path, s3_keys: None) -> None:
    """A job trains, its worker resumes a broken download, its adapter is downloaded, old versions are deleted."""
    if place == "memory":
        train(tmp_path, "memory:///")
    else:
        with moto() as endpoint:
            train(tmp_path, "s3://rookery/prefix", endpoint)
            train(tmp_path, "s3://rookery/prefix", endpoint)  # the next service on the same data folder


def train(root: Path, url: str, endpoint: str = "") -> None:
    with (
        served(root, artifacts_url=url, artifacts_endpoint=endpoint) as service,
        Client(service.url, service.key) as client,
        ThreadedWorker(service.url, (root / "data" / "worker.token").read_text().strip(), tokenizer(root)) as worker,
    ):
        trained = client.submit(job(stop={"steps": 3}, checkpoints={"keep_last": 1, "keep_best": False}))
        trained.wait(60)
        assert trained.show().step == 3
        trained.adapter().download(root / trained.id)
        assert (root / trained.id / "adapter_model.safetensors").stat().st_size > 0
        ranged = [name for name in worker.read if name.endswith("from byte 10")]
        assert ranged and all(worker.read[name] == worker.read[name.split()[0]][10:] for name in ranged)
    assert {path.name for path in (root / "data" / "artifacts").iterdir()} == {".staging"}
