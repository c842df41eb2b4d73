"""Versions that are handed over on one machine before they are committed: files that trainer and engines all map.

* The trainer's files lie in a private folder of the machine's cache. A receiver gives them a second name in a private
  folder, and hashes them: no byte is copied or sent, and either process may end.
* Private files are no artifact: they are not listed in a ``Hello``, and not served. :meth:`HandedFolders.adopt` makes
  them one, once work names the version: then it is committed.
* A version that is not committed is withdrawn. The files of a process that was killed are deleted by the next one of
  the machine that begins, receives or withdraws.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rookery import protocol
from rookery.worker.transfer.cache import MANIFEST, AdapterCache, is_state, sha256
from rookery.worker.transfer.http import CorruptDownload, TransferFailed, decode_manifest

PRIVATE = re.compile(r"\.\d{1,10}\.[0-9a-f]{32}")
"""The name of a private folder of the cache."""


class HandedFolders:
    """Belongs to the I/O thread."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache
        self._folders: dict[str, tuple[protocol.Manifest, Path]] = {}
        """By hash, whole and verified."""

    def __contains__(self, digest: str) -> bool:
        return digest in self._folders

    def keep(self, manifest: protocol.Manifest, folder: Path) -> None:
        """``folder`` is this process's private one with the files of ``manifest``, whose hashes are verified."""
        self.withdraw([manifest.hash])
        self._folders[manifest.hash] = manifest, folder

    async def receive(self, digest: str, name: str) -> Path:
        """Take the version in the private folder ``name`` of another process of this machine. Raises
        :class:`TransferFailed`."""
        if not PRIVATE.fullmatch(name):
            raise TransferFailed(f"artifact {digest[:12]}: {name!r} is no folder of a hand-over")
        folder = self._cache.staging_folder()

        def link() -> protocol.Manifest:
            source = self._cache.folder(name)
            manifest = decode_manifest((source / MANIFEST).read_bytes(), digest)
            for shard in manifest.shards:
                if is_state(shard.name):
                    continue
                (folder / shard.name).hardlink_to(source / shard.name)
                if (folder / shard.name).stat().st_size != shard.size or sha256(folder / shard.name) != shard.sha256:
                    raise CorruptDownload(f"artifact {digest[:12]}: {shard.name} was handed over with a wrong hash")
            return manifest

        try:
            manifest = await asyncio.to_thread(link)
        except BaseException as error:
            self._cache.delete_staging(folder)
            if isinstance(error, OSError):
                raise TransferFailed(f"artifact {digest[:12]}: its hand-over ended ({error.strerror})") from None
            raise
        self.keep(manifest, folder)
        return folder

    def adopt(self, digest: str) -> bool:
        """Work names the version: make its files the artifact. Whether it was handed over."""
        manifest, folder = self._folders.pop(digest, (None, None))
        if manifest is None or folder is None:
            return False
        with suppress(OSError):  # such as a full disk: what is missing is pulled
            self._cache.insert_staged(manifest, folder)
        self._cache.delete_staging(folder)
        return True

    def withdraw(self, digests: Iterable[str]) -> None:
        """These versions are not committed, or nothing will name them again."""
        for digest in digests:
            _, folder = self._folders.pop(digest, (None, None))
            if folder is not None:
                self._cache.delete_staging(folder)  # in this thread: a few links, whose bytes another name may keep

    def clear(self) -> list[str]:
        """Withdraw all; their hashes."""
        digests = list(self._folders)
        self.withdraw(digests)
        return digests
