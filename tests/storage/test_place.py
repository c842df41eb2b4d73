"""Absence is not corruption: the owner of a place of artifacts, the meaning of a failure there, and what is deleted."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace as changed
from obstore.store import MemoryStore
from tests.storage.test_artifacts import store

from rookery.errors import (
    ArtifactsAway,
    CorruptArtifact,
    IncompleteArtifact,
    NotFound,
    RookeryError,
    StorageFull,
    Unavailable,
    UserError,
)
from rookery.storage.artifacts import NO_FOLDER_SYNC, Artifacts, Place
from rookery.storage.data_dir import DataFolder
from rookery.storage.object_artifacts import ObjectArtifacts
from rookery.storage.opening import artifacts_at, open_artifacts
from rookery.storage.place import (
    HOLD_SECONDS,
    OWNER,
    Incarnation,
    Lease,
    Owner,
    PlaceInUse,
    admit,
    incarnation,
    understood,
)

OURS = Owner("postgresql://host/db", "a" * 32, "/old on one", frozenset({"x", "y"}))
NEW = Owner("sqlite:///new", "b" * 32, "", frozenset())


@pytest.mark.parametrize(
    ("owner", "mark", "found", "right"),
    [
        (NEW, None, set(), True),
        (OURS, OURS.identity, set(), False),  # the artifacts may come back one by one
        (OURS, OURS.identity, {"z"}, False),
        (OURS, None, {"x"}, True),  # of a version without marks, or copied without the mark
        (OURS, NEW.identity, {"x", "y"}, "belong to another database than postgresql://host/db; it used /old on one"),
        (NEW, OURS.identity, {"x"}, "belong to another database than sqlite:///new"),
        (replace(NEW, identity=None), OURS.identity, set(), "belong to another database"),
        (OURS, "", set(), "belong to another database"),
        (OURS, None, set(), "has none of the 2 artifacts that the database postgresql://host/db names; it used /old"),
        (OURS, None, {"z"}, "has none of the 2 artifacts"),
        (NEW, None, {"z"}, "has 1 artifact, none of which the database sqlite:///new names"),
        (
            replace(OURS, named=frozenset()),
            None,
            set(),
            "is not the place of the artifacts .* it used /old on one last",
        ),
        (replace(OURS, named=frozenset()), None, {"z"}, "has 1 artifact, none of which"),
        (replace(OURS, named=None), None, {"z"}, True),  # decided again once the tables are migrated
        (replace(OURS, named=None), NEW.identity, {"z"}, "belong to another database"),
    ],
)
def test_a_place_is_admitted_marked_or_refused_with_both_names(
    owner: Owner, mark: str | None, found: set[str], right: bool | str
) -> None:
    if isinstance(right, bool):
        assert admit(owner, "/here", mark, lambda: found) is right
    else:
        with pytest.raises(UserError, match=right) as refused:
            admit(owner, "/here", mark, lambda: found)
        assert "/here" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("number", sorted(errno.errorcode))
@pytest.mark.parametrize("present", [True, False])
def test_no_error_of_the_system_means_that_bytes_are_wrong(number: int, present: bool) -> None:
    """Only a full disk, absence in a place that is there, and "not now" come of any error number."""

    def check() -> None:
        if not present:
            raise ArtifactsAway("away")

    with pytest.raises(RookeryError) as raised, understood(check):
        raise OSError(number, os.strerror(number))
    right: tuple[type[RookeryError], ...] = (StorageFull, Unavailable) if present else (StorageFull, ArtifactsAway)
    if number == errno.ENOENT:
        right = (NotFound,) if present else (ArtifactsAway,)
    elif number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
        right = (Unavailable,)
    assert isinstance(raised.value, right)


ONE, TWO = (Incarnation(name, f"http://{name} with the data folder /{name}", ("lock",)) for name in ("one", "two"))
HELD = msgspec.json.encode(ONE)


@pytest.mark.parametrize(
    ("files", "ended", "right"),
    [
        ([(0, b"")], "", True),
        ([(0, bytes(4096))], "", True),  # as a power cut leaves it
        ([(0, HELD.ljust(4096))], "", False),
        ([(0, HELD)], "one", True),
        ([(0, msgspec.json.encode(changed(TWO, shown="renewed before")))], "", True),
        ([(0, HELD), (HOLD_SECONDS - 1, HELD)], "", False),
        ([(0, HELD), (HOLD_SECONDS, HELD)], "", True),
        ([(0, HELD), (5, msgspec.json.encode(changed(ONE, renewals=1)))], "", "/here are in use .*/one, .*/two"),
        ([(0, b"of a later version"), (HOLD_SECONDS, b"of a later version")], "", True),
        ([(0, b"of a later version"), (1, b"another text")], "", "in use by the service unknown"),
        ([(0, HELD), (1, b""), (2, HELD)], "", False),  # another one began and ended
    ],
)
def test_a_place_is_taken_from_a_holder_that_has_ended_only(
    files: list[tuple[float, bytes]], ended: str, right: bool | str
) -> None:
    times = [time for time, _ in files]
    lease = Lease(changed(TWO, locks=()), ended, lambda: times[0])
    for _, found in files[:-1]:
        lease.takes(found, "/here")
        del times[0]
    _, found = files[-1]
    if isinstance(right, bool):
        assert lease.takes(found, "/here") is right
    else:
        with pytest.raises(PlaceInUse, match=right) as refused:
            lease.takes(found, "/here")
        assert "\n" not in str(refused.value)


def test_a_service_has_its_place_again_at_once_after_a_crash(tmp_path: Path) -> None:
    """The kernel's lock on the data folder shows that the service before has ended; that of another folder does not."""
    services = []
    for name in ("data", "data", "copy"):
        with DataFolder(tmp_path / name) as folder:
            services.append(incarnation(str(len(services)), "http://host", folder.root, folder.locks))
    held = msgspec.json.encode(services[0])
    assert [Lease(service).takes(held, "/here") for service in services] == [True, True, False]


@pytest.mark.parametrize("kind", ["folder", "object store"])
def test_one_service_at_a_time_uses_a_place(kind: str, tmp_path: Path) -> None:
    """Both have the same identity: the database of one is a copy of the other's."""
    objects, now = MemoryStore(), 0.0

    def opened(name: str) -> Artifacts:
        at = tmp_path / name
        artifacts = Artifacts(tmp_path) if kind == "folder" else ObjectArtifacts(objects, "memory:///", at)
        artifacts.claim(owner_of())
        return artifacts

    one, two = opened("one"), opened("two")
    first, second = Lease(ONE, clock=lambda: now), Lease(changed(TWO, locks=()), clock=lambda: now)
    manifest = store(one, {"a": b"content"})
    assert one.hold(first) and not two.hold(second) and one.hold(first)
    with pytest.raises(PlaceInUse, match=r"/one, .*/two"):
        two.hold(second)
    assert one.hashes() == {manifest.hash}
    now += HOLD_SECONDS
    assert two.hold(second), "it stood still for so long"
    for call in (
        one.check,
        one.hashes,
        one.sweep if kind == "folder" else one.check,
        lambda: one.delete(manifest.hash),
    ):
        with pytest.raises(ArtifactsAway) as raised:
            call()
        assert ONE.shown not in str(raised.value) and TWO.shown in raised.value.detail
    assert two.verify(manifest.hash) == manifest and not one.hold(first)
    two.release()
    assert not two.hold(second), "it ends"
    assert one.hold(first)
    one.delete(manifest.hash)
    one.release()
    assert two.hold(Lease(TWO))


def owner_of(*named: str) -> Owner:
    return replace(NEW, named=frozenset(named))


def unmount(root: Path) -> Callable[[], object]:
    root.rename(root.with_name("away"))
    return lambda: root.with_name("away").rename(root)


def unmount_over_a_folder(root: Path) -> Callable[[], object]:
    """The mount point is an empty folder."""
    back = unmount(root)
    root.mkdir()
    return lambda: (shutil.rmtree(root), back())


def unmount_over_staging(root: Path) -> Callable[[], object]:
    """The mount point has what a service made there before the disk was mounted for the first time."""
    back = unmount(root)
    (root / ".staging").mkdir(parents=True)
    return lambda: (shutil.rmtree(root), back())


def mount_another(root: Path) -> Callable[[], object]:
    back = unmount(root)
    open_artifacts(Place(), root, Owner("other", "c" * 32, "", frozenset()))
    return lambda: (shutil.rmtree(root), back())


def leave_a_dangling_link(root: Path) -> Callable[[], object]:
    back = unmount(root)
    root.symlink_to(root.with_name("nowhere"))
    return lambda: (root.unlink(), back())


def put_a_file_in_its_place(root: Path) -> Callable[[], object]:
    back = unmount(root)
    root.write_text("")
    return lambda: (root.unlink(), back())


def lose_the_mark(root: Path) -> Callable[[], object]:
    (root / OWNER).rename(root / "mark")
    return lambda: (root / "mark").rename(root / OWNER)


AWAY = [
    unmount, unmount_over_a_folder, unmount_over_staging, mount_another, leave_a_dangling_link,
    put_a_file_in_its_place, lose_the_mark,
]  # fmt: skip


@pytest.mark.parametrize("leave", AWAY)
def test_nothing_is_concluded_written_or_deleted_while_the_place_is_away(
    leave: Callable[[Path], Callable[[], object]], tmp_path: Path
) -> None:
    root = tmp_path / "shared"
    artifacts = open_artifacts(Place(str(root)), tmp_path / "data", owner_of())
    kept, dead = store(artifacts, {"a": b"kept"}), store(artifacts, {"a": b"dead"})
    staging = artifacts.begin()
    staging.write("a", [b"late"])
    back = leave(root)
    before = {*tmp_path.rglob("*")}

    def read() -> None:
        with artifacts.reading(kept.hash, kept.shards[0]) as chunks:
            assert b"".join(chunks) == b"kept"

    for call in (
        lambda: artifacts.open(kept.hash),
        lambda: artifacts.verify(kept.hash),
        lambda: artifacts.path(kept.hash, "a"),
        lambda: artifacts.link(kept.hash, tmp_path / "link"),
        lambda: artifacts.delete(dead.hash),
        lambda: artifacts.prune({kept.hash}),
        artifacts.hashes,
        artifacts.sweep,
        artifacts.begin,
        staging.commit,
        artifacts.check,
        read,
    ):
        if leave is lose_the_mark and call in (read,):
            continue  # what is read is hashed by its reader
        try:
            found = call()
        except (ArtifactsAway, IncompleteArtifact) as error:
            assert isinstance(error, ArtifactsAway), error
        else:
            assert leave is lose_the_mark, found  # the bytes are there, and right
    assert before <= {*tmp_path.rglob("*")}
    back()
    staging.commit()
    assert artifacts.hashes() >= {kept.hash, dead.hash}
    assert artifacts.verify(kept.hash) == kept and artifacts.verify(dead.hash) == dead


@pytest.mark.parametrize("number", sorted({errno.EIO, errno.ENOSPC, *NO_FOLDER_SYNC}))
def test_a_disk_that_writes_no_folders_on_request_is_used_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts, really = open_artifacts(Place(), tmp_path, owner_of()), os.fsync

    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        really(handle)

    monkeypatch.setattr(os, "fsync", refused)
    if number in NO_FOLDER_SYNC:
        manifest = store(artifacts, {"a": b"content"})
        assert artifacts.verify(manifest.hash) == manifest
        return
    with pytest.raises((Unavailable, StorageFull)):
        store(artifacts, {"a": b"content"})


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EPERM, errno.ETIMEDOUT, errno.ELOOP, errno.EROFS]
)
@pytest.mark.parametrize("name", ["a", "manifest.json", OWNER])
def test_a_file_that_cannot_be_read_is_not_corrupt(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifacts = open_artifacts(Place(), tmp_path, owner_of())
    manifest = store(artifacts, {"a": b"content"})
    really = Path.open

    def refused(path: Path, *arguments: object, **named: object) -> object:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return really(path, *arguments, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refused)
    if name == OWNER:
        with pytest.raises(ArtifactsAway):
            artifacts.delete(manifest.hash)
    else:
        with pytest.raises(Unavailable, match=rf"cannot be used \({os.strerror(number).lower()}\)") as raised:
            artifacts.verify(manifest.hash)
        assert str(tmp_path) not in str(raised.value), "tenants read no path"
        assert str(tmp_path) in raised.value.detail, "operators do"
    monkeypatch.undo()
    assert artifacts.verify(manifest.hash) == manifest


@pytest.mark.parametrize("kind", ["folder", "object store"])
def test_absent_bytes_are_incomplete_and_other_bytes_are_corrupt(kind: str, tmp_path: Path) -> None:
    objects = MemoryStore()
    artifacts = Artifacts(tmp_path) if kind == "folder" else ObjectArtifacts(objects, "memory:///", tmp_path)
    artifacts.claim(owner_of())
    files = {"a": b"0123456789", "b": b"b"}
    manifest = store(artifacts, files)

    def put(name: str, content: bytes | None) -> None:
        path = f"{manifest.hash}/{name}"
        if kind == "folder":
            (tmp_path / path).unlink() if content is None else (tmp_path / path).write_bytes(content)
        else:
            objects.delete(path) if content is None else objects.put(path, content)

    for name, content, right in (
        ("a", None, IncompleteArtifact),
        ("a", b"01234", IncompleteArtifact),
        ("b", b"", IncompleteArtifact),
        ("a", b"0123456780", CorruptArtifact),
        ("a", b"01234567890", CorruptArtifact),
        ("manifest.json", b"{}", CorruptArtifact),
    ):
        put(name, content)
        with pytest.raises(CorruptArtifact) as raised:
            artifacts.verify(manifest.hash)
        assert type(raised.value) is right
        assert store(artifacts, files) == manifest == artifacts.verify(manifest.hash), "committed again, it is whole"


def test_an_artifact_that_a_database_forgot_for_a_moment_stays(tmp_path: Path) -> None:
    """An older copy of the database, started once, does not name the newest versions."""
    artifacts = open_artifacts(Place(), tmp_path, owner_of())
    old, new = store(artifacts, {"a": b"old"}).hash, store(artifacts, {"a": b"new"}).hash
    day = 86400.0

    def pruned(live: set[str], ran: float) -> list[str]:
        """By a start, after which the service runs for a time."""
        service = open_artifacts(Place(), tmp_path, owner_of())
        deleted = service.prune(live, day)
        service.ran(ran)
        return deleted

    assert pruned({old}, day) == []
    assert pruned({old, new}, day) == []  # the right database
    assert pruned({old}, day - 1.0) == []  # the wrong one again: its time begins again
    assert pruned({old}, 2.0) == []
    assert artifacts.hashes() == {old, new}
    assert pruned({old}, 0.0) == [new]
    assert pruned({old}, 0.0) == []
    assert artifacts.hashes() == {old}


@pytest.mark.parametrize("remote", [False, True])
def test_a_wall_clock_that_is_set_deletes_no_artifact(tmp_path: Path, remote: bool) -> None:
    """Days of it pass between the starts, in which no service runs."""
    artifacts: Artifacts = Artifacts(tmp_path)
    if remote:
        artifacts = ObjectArtifacts(MemoryStore(), "memory:///", tmp_path)
        artifacts.claim(owner_of())
    digest = store(artifacts, {"a": b"a"}).hash
    for _ in range(10):
        assert artifacts.prune([], keep=10.0) == []
    assert artifacts.hashes() == {digest}


def test_orphans_in_an_object_store_wait_as_well(tmp_path: Path) -> None:
    artifacts = ObjectArtifacts(MemoryStore(), "memory:///", tmp_path)
    artifacts.claim(owner_of())
    digest = store(artifacts, {"a": b"a"}).hash
    for live in ([], [digest], []):
        assert artifacts.prune(live, keep=10.0) == []
        artifacts.ran(10.0)
    assert artifacts.prune([], keep=10.0) == [digest]
    assert artifacts.hashes() == set()


def test_a_refused_place_is_left_as_it_was(tmp_path: Path) -> None:
    used = replace(NEW, where="/elsewhere", named=frozenset({"c" * 64}))
    for place in (tmp_path / "missing", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match="has none of the 1 artifact "):
            open_artifacts(Place(str(place)), tmp_path / "data", used)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.EROFS, UserError),
        (errno.EACCES, UserError),
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.EIO, Unavailable),
        (errno.ESTALE, Unavailable),
        (errno.ENOTCONN, Unavailable),
        (errno.EMFILE, Unavailable),
    ],
)
@pytest.mark.parametrize("call", ["TemporaryFile", "mkstemp", "fsync"])
def test_a_place_that_may_be_usable_later_is_no_mistake_and_keeps_nothing(
    call: str, number: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that ends with a mistake is not started again."""

    def refused(*arguments: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os if call == "fsync" else tempfile, call, refused)
    with pytest.raises(error):
        artifacts_at(Place(str(tmp_path / "place")), tmp_path).claim(NEW)
    assert [path.name for path in (tmp_path / "place").iterdir()] == [".staging"]
    monkeypatch.undo()
    artifacts_at(Place(str(tmp_path / "place")), tmp_path).claim(NEW)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "file/below"):
        with pytest.raises(UserError, match="cannot be used"):
            artifacts_at(Place(str(tmp_path / name)), tmp_path).claim(NEW)
