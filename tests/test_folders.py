"""Every folder is checked at the start, its setting named, in one line with exit code 2."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rookery.cli import app, main
from rookery.errors import StorageFull, UserError
from rookery.folders import expanded, usable_cache, usable_folder
from rookery.settings import Settings
from rookery.storage.data_dir import DataFolder, read_secret


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


def test_a_folder_is_made_and_probed(tmp_path: Path) -> None:
    made = usable_cache(tmp_path / "a" / "b")
    assert made.is_dir() and list(made.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_refused_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    for folder in ("file", "file/below", "cache", "link"):
        with pytest.raises(UserError, match=r"setting ROOKERY_CACHE: folder .* cannot be written") as refused:
            usable_cache(tmp_path / folder)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("number", "error", "match"),
    [
        (errno.EACCES, UserError, "Permission denied"),
        (errno.EROFS, UserError, "Read-only file system"),
        (errno.ENOSPC, StorageFull, "the disk of .* is full; .* set ROOKERY_DATA to another folder"),
        (errno.EDQUOT, StorageFull, "the disk of .* is full"),
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
    DataFolder(tmp_path / "data").close()


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
