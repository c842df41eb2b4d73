"""The paths that users name."""

from __future__ import annotations

from pathlib import Path

from rookery.errors import UserError, short


def named_path(given: str | Path) -> Path:
    """The file or folder that a user names, with its ``~`` replaced. Raises :class:`UserError` for a text that is no
    path."""
    try:
        if "\0" in str(given):
            raise RuntimeError("it has a NUL in it")
        return Path(given).expanduser()
    except RuntimeError as error:
        raise UserError(f"{short(repr(str(given)))} is no path here ({error}); give another") from None
