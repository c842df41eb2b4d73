"""Copies of an artifact that cross between sites: real peers with a socket and a folder each, the decisions of the
shipped store, and relays between the sites that count the bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.support.dialled import Dialled
from tests.support.peers import MODEL
from tests.support.relays import Relay
from tests.support.weights import VirtualStore
from tests.worker.transfer.test_client import PATIENT, Peer

from rookery import protocol

WEIGHTS = os.urandom(100_000)
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}
SIZE = sum(map(len, FILES.values()))
HEADERS = 1.05
"""Times the artifact's bytes that its answers may have: their headers, and the manifest."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Dialled]:
    with Dialled(tmp_path / "artifacts") as service:
        yield service


class Sites:
    """Workers of several sites. One reads from another site by a relay, whose address it is given."""

    def __init__(self, service: Dialled, folder: Path) -> None:
        self._service, self._folder = service, folder
        self.virtual = VirtualStore()
        self.peers: dict[str, Peer] = {}
        self.site: dict[str, str] = {}
        self.relays: list[Relay] = []
        self._starting = asyncio.Lock()
        self._between: dict[tuple[str, str], str] = {}
        """The address of a relay, by the site that reads and the address that it reads from."""

    def join(self, name: str, site: str, in_use: Sequence[protocol.AdapterRef] = (), role: str = "rollout") -> None:
        peer = Peer(self._service, self._folder / name, rules=PATIENT, ask=partial(self._ask, name), peer_seconds=60.0)
        self.peers[name], self.site[name] = peer, site
        self.virtual.join(name, peer.transfers.cached(), in_use, site=site, address=peer.url, roles=[role])

    async def receive(self, *names: str) -> None:
        """These workers carry out their orders, all at once."""
        await asyncio.gather(*map(self._receive, names))

    async def _receive(self, name: str) -> None:
        peer, worker = self.peers[name], self.virtual.fleet.workers[name]
        orders = [message for message in self.virtual.messages(worker) if isinstance(message, protocol.Replicate)]
        for ref in [ref for order in orders for ref in order.refs]:
            await peer.pull(msgspec.structs.replace(ref, sources=await self._ways(name, ref.sources)))
            found = peer.root / "adapters" / ref.hash
            assert {file: (found / file).read_bytes() for file in FILES} == FILES
            self.virtual.store.on_cached(worker, protocol.AdaptersCached(epoch=1, hashes=[ref.hash]))

    async def _ask(self, name: str, digest: str, failed: str) -> list[str]:
        worker = self.virtual.fleet.workers[name]
        behind = {relay: source for (_, source), relay in self._between.items()}
        message = protocol.SourcesRequest(epoch=1, hash=digest, failed=behind.get(failed, failed))
        self.virtual.store.on_sources_request(worker, message)
        answers = [one for one in self.virtual.messages(worker) if isinstance(one, protocol.Sources)]
        return await self._ways(name, answers[-1].sources)

    async def _ways(self, name: str, sources: Sequence[str]) -> list[str]:
        return [await self._way(self.site[name], source) for source in sources]

    async def _way(self, site: str, source: str) -> str:
        """The address by which workers of ``site`` reach ``source``."""
        [holder] = [name for name, peer in self.peers.items() if peer.url == source]
        if self.site[holder] == site:
            return source
        async with self._starting:
            if (site, source) not in self._between:
                parts = urlsplit(source)
                self.relays.append(Relay(parts.hostname or "", parts.port or 0))
                self._between[site, source] = await self.relays[-1].start()
        return self._between[site, source]

    @property
    def crossed(self) -> float:
        """Copies that crossed between sites."""
        return sum(relay.answered for relay in self.relays) / SIZE

    async def close(self) -> None:
        await asyncio.gather(*(relay.close() for relay in self.relays))
        await asyncio.gather(*(peer.close() for peer in self.peers.values()))


@pytest.mark.parametrize(("receivers", "sites"), [(1, 1), (1, 2), (5, 3), pytest.param(64, 5, marks=pytest.mark.heavy)])
async def test_one_copy_crosses_to_each_site(service: Dialled, tmp_path: Path, receivers: int, sites: int) -> None:
    """Whatever the number of receivers is, and also with one more at each site that joins later."""
    here = Sites(service, tmp_path)
    ref = service.ref(service.store(FILES), 1)
    here.join("trainer", "s0", role="train")
    await here.peers["trainer"].pull(ref)  # from the service, as the version that it made and uploaded
    virtual, trainer = here.virtual, here.virtual.fleet.workers["trainer"]
    virtual.store.on_cached(trainer, protocol.AdaptersCached(epoch=1, hashes=[ref.hash]))
    service.requests.clear()
    for number in range(receivers):
        here.join(f"w{number:02d}", f"s{(number + 1) % sites}")
    virtual.store.publish(MODEL, ref)
    await here.receive(*(name for name in here.peers if name != "trainer"))
    far = {site for name, site in here.site.items() if site != "s0"}
    for site in sorted({"s0", *far}) if receivers > 1 else []:
        here.join(f"late {site}", site, [ref])
        await here.receive(f"late {site}")
    assert len(far) <= here.crossed <= len(far) * HEADERS
    assert here.peers["trainer"].server.bytes_sent / SIZE <= (sites + 1) * HEADERS
    assert service.requests == []
    await here.close()
