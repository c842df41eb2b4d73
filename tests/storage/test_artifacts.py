"""Artifacts are whole or absent, whatever kills the writer; the data folder has one service and private secrets."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.errors import Conflict, CorruptArtifact, NotFound, UserError
from rookery.protocol import Manifest, manifest_of
from rookery.storage.artifacts import MANIFEST, Artifacts
from rookery.storage.data_dir import ADMIN_KEY_FILE, WORKER_TOKEN_FILE, DataFolder, hash_key, new_key, read_secret

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(lambda n: n.lower() != MANIFEST)
contents = st.dictionaries(names, st.lists(st.binary(max_size=200), max_size=4), min_size=1, max_size=4)


def store(artifacts: Artifacts, files: dict[str, bytes]) -> Manifest:
    with artifacts.begin() as staging:
        for name, content in files.items():
            staging.write(name, [content])
        return staging.commit()


def staged(artifacts_root: Path) -> list[Path]:
    return list((artifacts_root / ".staging").iterdir())


@settings(max_examples=examples(40))
@given(files=contents, data=st.data())
def test_written_content_is_read_unchanged(files: dict[str, list[bytes]], data: st.DataObject) -> None:
    order = data.draw(st.permutations(sorted(files)))
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Artifacts(Path(folder))
        with artifacts.begin() as staging:
            shards = [staging.write(name, files[name]) for name in order]
            manifest = staging.commit()
        assert manifest == manifest_of(reversed(shards))
        assert artifacts.verify(manifest.hash) == artifacts.open(manifest.hash) == manifest
        assert artifacts.hashes() == {manifest.hash}
        for shard in manifest.shards:
            content = artifacts.path(manifest.hash, shard.name).read_bytes()
            assert content == b"".join(files[shard.name])
            assert (shard.size, shard.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert staged(Path(folder)) == []


@settings(max_examples=examples(40))
@given(content=st.binary(min_size=1, max_size=300), data=st.data())
def test_any_damage_is_found_and_mended_by_committing_again(content: bytes, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Artifacts(Path(folder))
        good = store(artifacts, {"a": content})
        victim = Path(folder) / good.hash / data.draw(st.sampled_from(["a", MANIFEST]))
        original = victim.read_bytes()
        damage = data.draw(st.sampled_from(["flip", "cut", "grow", "remove"]))
        at = data.draw(st.integers(0, len(original) - 1))
        if damage == "flip":
            changed = bytes([original[at] ^ (1 << data.draw(st.integers(0, 7)))])
            victim.write_bytes(original[:at] + changed + original[at + 1 :])
        elif damage == "cut":
            victim.write_bytes(original[:at])
        elif damage == "grow":
            victim.write_bytes(original + b"!")
        else:
            victim.unlink()
        with pytest.raises(CorruptArtifact, match=good.hash):
            artifacts.verify(good.hash)
        assert store(artifacts, {"a": content}) == good
        assert artifacts.verify(good.hash) == good


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b/c", ".hidden", "a\x00b", "manifest.json", "Manifest.JSON"],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    artifacts = Artifacts(tmp_path / "artifacts")
    with artifacts.begin() as staging, pytest.raises(UserError):
        staging.write(name, [b"x"])
    manifest = store(artifacts, {"a": b"x"})
    with pytest.raises(NotFound):
        artifacts.path(manifest.hash, name)
    with pytest.raises(NotFound):
        artifacts.open(name)


def test_an_artifact_has_a_largest_size(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, max_bytes=10)
    with artifacts.begin() as staging:
        staging.write("a", [b"12345"])
        with pytest.raises(UserError, match="limit"):
            staging.write("b", [b"123", b"456"])
        staging.write("a", [b"1234567890"])  # an upload tried again replaces the first
        assert [shard.size for shard in staging.commit().shards] == [10]


def test_only_committed_artifacts_are_visible(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    with artifacts.begin() as staging:
        staging.write("a", [b"x"])
    assert artifacts.hashes() == set()
    assert staged(tmp_path) == []
    with artifacts.begin() as staging, pytest.raises(Conflict):
        staging.commit()
    staging = artifacts.begin()
    writer = staging.begin("late")
    writer.write(b"x")
    staging.abandon()
    with pytest.raises(Conflict):
        writer.finish()


def test_deleting_and_sweeping(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    kept, dead = store(artifacts, {"a": b"kept"}), store(artifacts, {"a": b"dead"})
    artifacts.begin().write("left", [b"behind by a crash"])
    assert artifacts.sweep() == 1
    assert artifacts.prune({kept.hash}) == [dead.hash]
    assert artifacts.hashes() == {kept.hash}
    artifacts.delete(dead.hash)
    artifacts.delete(kept.hash)
    assert artifacts.hashes() == set()
    assert staged(tmp_path) == []
    with pytest.raises(NotFound):
        artifacts.open(kept.hash)


@pytest.mark.parametrize("lost", ["its own", "the time"])
def test_orphan_whose_mark_was_lost_in_a_power_cut_is_marked_again(tmp_path: Path, lost: str) -> None:
    artifacts, day = Artifacts(tmp_path), 86400.0
    with artifacts.begin() as staging:
        staging.write("x", [b"1"])
        digest = staging.commit().hash
    assert Artifacts(tmp_path).prune(set(), day) == []
    artifacts.prune(set(), day)
    artifacts.ran(day / 2)
    (tmp_path / ".orphans" / digest).write_text(str(1.7e9 if lost == "the time" else ""))
    artifacts.ran(day / 4)
    if lost == "the time":
        (tmp_path / ".orphans" / "ran").write_bytes(b"")
    for seconds in (day / 2, day / 2):
        assert artifacts.prune(set(), day) == []
        artifacts.ran(seconds)
    assert artifacts.prune(set(), day) == [digest]


def test_the_same_content_from_many_threads_is_one_artifact(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path)
    hashes: list[str] = []
    barrier = threading.Barrier(8)

    def commit() -> None:
        with artifacts.begin() as staging:
            staging.write("a", [b"same"])
            barrier.wait()
            hashes.append(staging.commit().hash)

    threads = [threading.Thread(target=commit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashes) == 8
    assert artifacts.hashes() == set(hashes)
    artifacts.verify(hashes[0])
    assert staged(tmp_path) == []


def test_artifacts_that_appear_or_are_deleted_during_a_read_are_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others commit and delete the same content: a reader finds the whole of it, or nothing."""
    artifacts = Artifacts(tmp_path)
    hash = store(artifacts, {"a": b"same"}).hash

    def meanwhile(patched: pytest.MonkeyPatch, method: str, name: str, happens: Callable[[Path], object]) -> None:
        """When a file's ``method`` is next called, this comes before it."""
        usual, left = getattr(Path, method), [happens]

        def call(path: Path, *arguments: Any, **named: Any) -> Any:
            if (path.parent.name, path.name) == (hash, name) and left:
                left.pop()(path)
            return usual(path, *arguments, **named)

        patched.setattr(Path, method, call)

    def delete(path: Path) -> None:
        artifacts.delete(hash)

    def again(path: Path) -> None:
        """It is deleted, looked for, and made again."""
        artifacts.delete(hash)
        try:
            path.stat()
        finally:
            store(artifacts, {"a": b"same"})

    for look, method, name in ((artifacts.open, "read_bytes", MANIFEST), (artifacts.verify, "open", "a")):
        with monkeypatch.context() as patched:
            meanwhile(patched, method, name, again)
            assert look(hash).hash == hash
            meanwhile(patched, method, name, delete)
            with pytest.raises(NotFound):
                look(hash)
        store(artifacts, {"a": b"same"})


_DIE_AT_EVERY_FILE_OPERATION = """
import os, signal, sys
from pathlib import Path
from rookery.storage.artifacts import Artifacts

def run(root, point):
    left = point
    def hook(event, arguments):
        nonlocal left
        if event.startswith(("open", "os.", "shutil.", "tempfile.")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    artifacts = Artifacts(Path(root))
    with artifacts.begin() as old:
        old.write("a", [b"old"])
        gone = old.commit().hash
    sys.addaudithook(hook)
    with artifacts.begin() as staging:
        staging.write("a", [b"new"]); staging.write("b", [b"x" * 70000] * 3)
        staging.commit()
    artifacts.delete(gone)
    os._exit(0)

point = 0
while True:
    point += 1
    root = f"{sys.argv[1]}/{point}"
    child = os.fork()
    if child == 0:
        run(root, point)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
print(point)
"""


def test_death_at_any_file_operation_leaves_artifacts_whole_or_absent(tmp_path: Path) -> None:
    """The writer kills itself before its first, second, … file operation of a commit and a delete."""
    done = subprocess.run(
        [sys.executable, "-c", _DIE_AT_EVERY_FILE_OPERATION, str(tmp_path)], capture_output=True, text=True, check=True
    )
    points = int(done.stdout)
    assert points > 15
    seen = []
    for point in range(1, points + 1):
        artifacts = Artifacts(tmp_path / str(point))
        artifacts.sweep()
        assert staged(tmp_path / str(point)) == []
        for hash in artifacts.hashes():
            artifacts.verify(hash)
        seen.append(artifacts.hashes())
    old, new = seen[0], seen[-1]
    assert len(old) == len(new) == 1
    stages = [old, old | new, new]
    moments = [stages.index(hashes) for hashes in seen]
    assert moments == sorted(moments) and set(moments) == {0, 1, 2}


_COMMIT_FOREVER = """
import itertools, os, sys, threading
from pathlib import Path
from rookery.storage.artifacts import Artifacts
artifacts = Artifacts(Path(sys.argv[1]))
def work(name):
    for n in itertools.count():
        with artifacts.begin() as staging:
            staging.write("adapter", [f"{name} {n}".encode() * 500] * 20)
            staging.write("state", [b"s" * n])
            os.write(1, (staging.commit().hash + "\\n").encode())
for name in "ab":
    threading.Thread(target=work, args=(name,)).start()
"""


def test_kill_9_at_random_moments_loses_nothing_acknowledged(tmp_path: Path) -> None:
    random_moment = random.Random(7)
    for round_ in range(6):
        root = tmp_path / str(round_)
        with subprocess.Popen([sys.executable, "-c", _COMMIT_FOREVER, str(root)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            acknowledged = [writer.stdout.readline().decode().strip() for _ in range(random_moment.randint(1, 60))]
            writer.kill()
            acknowledged += writer.stdout.read().decode().split()
        artifacts = Artifacts(root)
        artifacts.sweep()
        for hash in artifacts.hashes():
            artifacts.verify(hash)
        assert artifacts.hashes() >= set(acknowledged)
        assert staged(root) == []


_FILL_THE_DISK = """
import sys
from pathlib import Path
from rookery.errors import StorageFull
from rookery.storage.artifacts import Artifacts
from rookery.storage.db import Database
from rookery.storage.repositories import tenants
root = Path(sys.argv[1])
artifacts = Artifacts(root / "artifacts")
database = Database(f"sqlite:///{root}/rookery.db")
database.create()
database.write(tenants.create_tenant, "t", "T", 0.0)
kept = []
artifacts.check_reserve(1 << 60)
try:
    for n in range(100):
        with artifacts.begin() as staging:
            staging.write("a", [bytes([n]) * 50_000] * 2)
            kept.append(staging.commit().hash)
except StorageFull as error:
    print(error)
assert 0 < len(kept) < 100
artifacts.check_reserve(0)
try:
    artifacts.check_reserve(1 << 60)
except StorageFull as error:
    assert "bytes free" in str(error)
else:
    raise AssertionError("an upload may take the last of the disk")
with artifacts.begin() as staging:
    try:
        staging.write("a", [b"small"], 1 << 60)
    except StorageFull as error:
        assert "bytes free" in str(error)
    else:
        raise AssertionError("a file of an upload may take the last of the disk")
assert artifacts.hashes() == set(kept) and not list((root / "artifacts/.staging").iterdir())
for hash in kept:
    artifacts.verify(hash)
stored = 0
try:
    for n in range(1000):
        database.write(tenants.add_event, "t", None, float(n), "fill", "x" * 10_000)
        stored += 1
except StorageFull as error:
    print(error)
assert stored < 1000
assert len(database.read(tenants.events, "t", None, 10_000)) == stored
for hash in kept:
    artifacts.delete(hash)
assert artifacts.hashes() == set()
database.write(tenants.add_event, "t", None, 0.0, "room again", "")
print("survived")
"""


def test_a_full_disk_is_reported_and_leaves_no_partial_artifact(tmp_path: Path) -> None:
    """On a real file system of 4 MB, mounted for the one process."""
    probe = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("this machine does not let its user mount a small file system (unshare -rm)")
    mount_and_run = f'mount -t tmpfs -o size=4m none "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    command = ["unshare", "-rm", "sh", "-c", mount_and_run, sys.executable, _FILL_THE_DISK]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("disk") == 2
    assert done.stdout.endswith("survived\n")


# --- the data folder -------------------------------------------------------------------------------------------------


def test_secrets_are_made_once_and_private(tmp_path: Path) -> None:
    root = tmp_path / "new" / "data"
    with DataFolder(root) as folder:
        key, token = folder.admin_key(), folder.worker_token()
        assert (folder.admin_key(), folder.worker_token()) == (key, token)
    assert key.startswith("tml-") and len(key) >= 40 and key != token
    assert read_secret(root, ADMIN_KEY_FILE) == key
    assert read_secret(root, WORKER_TOKEN_FILE) == token
    assert read_secret(tmp_path, ADMIN_KEY_FILE) is None
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    for name in (ADMIN_KEY_FILE, WORKER_TOKEN_FILE):
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o600
    with DataFolder(root) as folder:
        assert folder.admin_key() == key
    assert key not in hash_key(key) and hash_key(key) == hashlib.sha256(key.encode()).hexdigest()
    assert new_key() != new_key()


_HOLD = """
import sys, signal
from pathlib import Path
from rookery.storage.data_dir import DataFolder
folder = DataFolder(Path(sys.argv[1]))
print("held", flush=True)
signal.pause()
"""


def test_a_second_service_is_refused_and_a_killed_one_frees_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=rf"in use by another service \(pid {holder.pid}\)"):
            DataFolder(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    DataFolder(tmp_path).close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be written"):
            DataFolder(root)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid() == 0:  # root writes everywhere: be nobody for this one
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="cannot be written"):
            DataFolder(closed)
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
