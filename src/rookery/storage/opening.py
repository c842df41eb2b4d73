"""Opens the artifacts at the place that the settings name: a folder, or an object store."""

from __future__ import annotations

from pathlib import Path

from rookery.folders import named_path
from rookery.storage.artifacts import Artifacts, Place
from rookery.storage.place import STORE_RULES, Owner, StoreRules


def open_artifacts(place: Place, folder: Path, owner: Owner, rules: StoreRules = STORE_RULES) -> Artifacts:
    """The artifacts at ``place``, claimed for the database ``owner``: a folder, also of a disk that machines share, or
    an object store. ``folder`` has those being written; all of them where ``place`` is empty. Raises
    :class:`UserError` for another owner's place, :class:`Unavailable` for a store that does not answer."""
    artifacts = artifacts_at(place, folder, rules)
    artifacts.claim(owner)
    return artifacts


def artifacts_at(place: Place, folder: Path, rules: StoreRules = STORE_RULES) -> Artifacts:
    """The artifacts at ``place``, not claimed. Raises :class:`UserError` for a URL of no store."""
    url, endpoint = place
    if "://" not in url or url.startswith("file://"):
        at = named_path(url.removeprefix("file://")).absolute() if url else folder
        return Artifacts(at, make=False)
    from rookery.storage.object_artifacts import ObjectArtifacts  # only it needs the library

    return ObjectArtifacts.at(url, endpoint, folder, rules)
