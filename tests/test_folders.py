"""Every folder is checked at the start, its setting named, in one line with exit code 2, or 1 if it may come back."""

from __future__ import annotations

import ast
import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.disks import small_files
from typer.testing import CliRunner

from rookery.cli import app, main
from rookery.errors import StorageFull, Unavailable, UserError
from rookery.folders import expanded, replaced, temporary_file, temporary_folder, usable_cache, usable_folder
from rookery.settings import Settings
from rookery.storage.artifacts import Place
from rookery.storage.data_dir import DataFolder, read_secret
from rookery.storage.opening import artifacts_at


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without a name and a home, as an image runs under any number."""

    def unknown(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", unknown)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_only_commands_that_need_one_fail(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert expanded(Path("~/x")) == Path("~/x")
    url = ["--url", "http://127.0.0.1:9"]
    for command in (["jobs", "list", "--key", "tml-x", *url], ["jobs", "list", *url], ["models"], ["doctor"]):
        result = CliRunner().invoke(app, command)
        assert "home" not in f"{result.output}{result.exception}", command
    for given, named in (
        (["serve", "--port", "0"], "ROOKERY_DATA"),
        (["serve", "--port", "0", "--data", str(tmp_path / "data")], "ROOKERY_CACHE"),
        (["models", "--get", "smollm2-135m-instruct"], "ROOKERY_CACHE"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 2
        line = capsys.readouterr().err.strip()
        assert "HOME is not set" in line and line.count("\n") == 0
        assert named in line or "ROOKERY_CACHE" in line
    assert not (tmp_path / "~").exists()


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("url", ["~/artifacts", "file://~/artifacts"])
def test_artifacts_in_a_home_that_is_not_known_are_one_line(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no path here"):
        artifacts_at(Place(url), tmp_path)


def test_a_folder_is_made_and_probed(tmp_path: Path) -> None:
    made = usable_cache(tmp_path / "a" / "b")
    assert made.is_dir() and list(made.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_refused_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    reasons = {
        "file": "it is a file",
        "file/below": "Not a directory",
        "cache": "Not a directory",
        "link": f"it is a link to {tmp_path / 'nowhere' / 'at all'}, which is missing",
    }
    for folder, reason in reasons.items():
        with pytest.raises(UserError, match=r"setting ROOKERY_CACHE: folder .* cannot be written") as refused:
            usable_cache(tmp_path / folder)
        assert "\n" not in str(refused.value) and f"({reason})" in str(refused.value)
    for folder in ("file", "link"):
        with pytest.raises(UserError, match=rf"data folder .* cannot be written \({reasons[folder]}\)"):
            DataFolder(tmp_path / folder)


@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (errno.EACCES, UserError, "Permission denied"),
        (errno.EROFS, UserError, "Read-only file system"),
        (errno.ENOSPC, StorageFull, "the disk of .* is full; .* set ROOKERY_DATA to another folder"),
        (errno.EDQUOT, StorageFull, "the disk of .* is full"),
        (errno.EIO, Unavailable, "folder .* cannot be written"),
        (errno.ESTALE, Unavailable, "folder .* cannot be written"),
        (errno.ENOTCONN, Unavailable, "folder .* cannot be written"),
        (errno.EMFILE, Unavailable, "folder .* cannot be written"),
    ],
)
def test_a_full_disk_is_not_the_database(
    number: int, error: type[Exception], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **named: object) -> object:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with pytest.raises(error, match=match):
        DataFolder(tmp_path / "data")
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        patch.setattr(os, "open", refused)
        DataFolder(tmp_path / "data")
    DataFolder(tmp_path / "data").close()


def test_a_secret_that_finds_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with DataFolder(tmp_path / "data") as folder:
        before = sorted(path.name for path in folder.root.iterdir())
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull):
            folder.admin_key()
        assert sorted(path.name for path in folder.root.iterdir()) == before
        monkeypatch.undo()
        assert folder.admin_key() == folder.admin_key()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_without_locks_is_refused_in_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(UserError, match=re.escape(f"cannot be locked ({os.strerror(number)})")):
        DataFolder(tmp_path / "data")
    with pytest.raises(UserError, match=r"setting ROOKERY_CACHE: folder .* cannot be locked"):
        usable_cache(tmp_path / "cache")
    usable_folder(tmp_path / "artifacts", "ROOKERY_DATA", ("logs",))  # nothing in it is locked


@pytest.mark.parametrize("name", ["folder", "binary", "loop"])
def test_a_key_that_cannot_be_read_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match=r"cannot be read .*; mount its disk, or set ROOKERY_KEY"):
        read_secret(tmp_path, name)


def test_settings_keep_given_folders(tmp_path: Path) -> None:
    settings = Settings.load({"ROOKERY_DATA": str(tmp_path), "ROOKERY_CACHE": "relative"})
    assert settings.data == tmp_path and settings.cache == Path("relative").absolute()


@pytest.mark.parametrize("make", [temporary_file, temporary_folder])
@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (errno.EROFS, UserError, r"TMPDIR: no temporary file can be made, as in /none; set TMPDIR"),
        (errno.ENOSPC, StorageFull, r"is full; .* set TMPDIR to another folder"),
        (errno.EMFILE, OSError, os.strerror(errno.EMFILE)),
        (None, UserError, r"TMPDIR: no temporary file can be made, as in /none; set TMPDIR"),
    ],
)
def test_no_place_for_temporary_files_is_refused_with_its_setting(
    make: Callable[[], object], number: int | None, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number, as the library fails that has found no folder at all: its error names no file."""

    def refused(*arguments: object, **named: object) -> object:
        raise (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/none', '/tmp']")
            if (number is None)
            else OSError(number, os.strerror(number))
        )

    monkeypatch.setenv("TMPDIR", "/none")
    for name in ("TemporaryFile", "TemporaryDirectory"):
        monkeypatch.setattr(tempfile, name, refused)
    with pytest.raises(error, match=match) as raised:
        make()
    assert "\n" not in str(raised.value)
    with pytest.raises(error) as elsewhere:
        temporary_folder(at="/elsewhere")
    assert "TMPDIR" not in str(elsewhere.value)


def test_a_file_of_a_user_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").write_bytes(b"before")
    for name in ("link", "new"):
        path = tmp_path / name
        with (
            small_files(4096),
            pytest.raises(StorageFull, match=f"{path} cannot be written: its disk is full"),
            replaced(path) as file,
        ):
            file.write(bytes(8192))
    assert (tmp_path / "kept").read_bytes() == b"before"
    with pytest.raises(FileNotFoundError) as missing, replaced(tmp_path / "none" / "file"):
        pass
    assert missing.value.filename == f"{tmp_path}/none/file"
    for name in ("link", "new"):
        with replaced(tmp_path / name) as file:
            file.write(name.encode())
    with replaced(Path("/dev/null")) as file:
        file.write(b"gone")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "link": b"link", "kept": b"link", "new": b"new",
    }  # fmt: skip
    assert (tmp_path / "link").is_symlink()


def test_a_command_without_a_temporary_folder_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    """A read-only root without a volume at /tmp."""
    job = tmp_path / "job.yaml"
    job.write_text("{name: a, base_model: b, environment: {id: calculator}, stop: {steps: 1}}")
    program = (
        "import sys, tempfile\n"
        "tempfile._candidate_tempdir_list = lambda: ['/proc/none']\n"
        "from rookery.cli import main\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "run", str(job), "--dry-run", "--data", str(tmp_path / "data")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
    ended = subprocess.run(
        command, cwd="/proc", env={**environment, "ROOKERY_PORT": "9"}, capture_output=True, text=True, timeout=120
    )  # in the last folder that the library tries
    said = ended.stderr
    assert ended.returncode == 2 and said.count("\n") == 1 and "set TMPDIR to a folder" in said, said


SOURCE = Path(__file__).parents[1] / "src" / "rookery"
FOREIGN = {"games_process.py", "verifiers_process.py"}
"""Programs for other interpreters, which import nothing of this package; their parent has looked before."""


def test_temporary_files_are_made_in_a_named_folder_or_by_one_function() -> None:
    made = {"mkdtemp", "mkstemp", "TemporaryFile", "TemporaryDirectory", "NamedTemporaryFile", "SpooledTemporaryFile"}
    found = set()
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if call.func.attr in made and not any(keyword.arg == "dir" for keyword in call.keywords):
                found.add(path.name)
    assert found == {"folders.py"} | FOREIGN
