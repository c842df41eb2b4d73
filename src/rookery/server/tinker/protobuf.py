"""The protocol's protobuf schema, as the ``tinker`` package publishes it.

The module is loaded from its file: importing the package itself would load PyTorch into the service.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from rookery.errors import installs

PROTOBUF = "application/x-protobuf"

SUPPORTED = "0.38"
"""The newest minor version of the SDK that is tested."""

OLDEST = "0.22.3"
"""The oldest version of the SDK that is tested: older ones send data in another form."""


def supported(version: str) -> bool:
    """Whether a client's version lies in the tested range."""
    newest = tuple(map(int, SUPPORTED.split(".")))
    try:
        given = tuple(map(int, version.split(".")[:3]))
    except ValueError:
        return False
    return tuple(map(int, OLDEST.split("."))) <= given and given[: len(newest)] <= newest


class Missing(ImportError):
    """The package is not installed."""


@cache
def load() -> Any:
    """The generated module. Raises :class:`Missing`."""
    package = importlib.util.find_spec("tinker")
    if package is None or package.origin is None:
        raise Missing(f"the tinker package is not installed: {installs('tinker')}")
    path = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    spec: ModuleSpec | None = importlib.util.spec_from_file_location("rookery_tinker_public_pb2", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Missing(f"the installed tinker package has no {path.name}: install {SUPPORTED}")
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
