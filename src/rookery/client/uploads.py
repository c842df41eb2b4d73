"""Uploads the files that a job names from this machine to the service."""

from __future__ import annotations

import copy
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rookery.client.connection import HttpConnection
from rookery.errors import UserError

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

DATASETS = {"path": "dataset", "eval_path": "eval_dataset"}
"""Options of a ``jsonl`` environment that name a local file, with the option that names its upload."""


def add_dataset(connection: HttpConnection, path: Path) -> str:
    """Uploads a JSONL file; returns the hash for ``environment.dataset``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"environment.path: {path} cannot be read ({error.strerror})") from None
    return str(connection.call("POST", "/api/v1/datasets", content=content)["dataset"])


def add_adapter(connection: HttpConnection, folder: Path) -> str:
    """Uploads a PEFT folder; returns the hash for ``warm_start.upload``."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", dereference=True) as archive:
        for name in ADAPTER_FILES:
            try:
                archive.add(folder / name, name)
            except OSError as error:
                raise UserError(f"warm_start.peft: {folder / name} cannot be read ({error.strerror})") from None
    return str(connection.call("POST", "/api/v1/adapters", content=tar.getvalue())["adapter"])


def upload_files(connection: HttpConnection, spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Uploads the files that ``spec`` names; returns it with their hashes instead of their paths. Relative paths start
    at ``folder``. A value that is not a path is left for the service to refuse."""
    sent: dict[str, Any] = copy.deepcopy(dict(spec))
    environment = sent.get("environment")
    if isinstance(environment, dict) and environment.get("id") == "jsonl":
        for given, sent_as in DATASETS.items():
            if isinstance(environment.get(given), str):
                path = folder / Path(environment.pop(given)).expanduser()
                environment[sent_as] = add_dataset(connection, path)
    policies = sent.get("policies")
    for policy in policies.values() if isinstance(policies, dict) else ():
        start = policy.get("warm_start") if isinstance(policy, dict) else None
        if isinstance(start, dict) and isinstance(start.get("peft"), str):
            start["upload"] = add_adapter(connection, folder / Path(start.pop("peft")).expanduser())
    return sent
