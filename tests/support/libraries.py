"""A stand-in for a library that environments import, here and in the processes that they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(folder: Path, name: str, code: str) -> Iterator[None]:
    """Within, the package ``name`` is ``code``, in ``folder``."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.delitem(sys.modules, name, raising=False)
        try:
            yield
        finally:
            sys.modules.pop(name, None)
