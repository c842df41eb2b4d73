"""Environment hosts that fall silent."""

from __future__ import annotations

import asyncio

from rookery import protocol
from rookery.aio import cancel_all
from rookery.clock import RandomIds
from rookery.controller.fleet.agents import Agents
from rookery.controller.fleet.env_hosts import EnvironmentHosts
from rookery.settings import Settings
from rookery.simulation.clock import VirtualClock
from rookery.simulation.clock import run as run_virtually


class Stopped:
    """The connection of a process that was stopped after its hello: it hangs in closing, too."""

    def __init__(self, instance: str) -> None:
        offered = [protocol.HostedEnvironment(name="adder", deterministic=True)]
        self.hello = protocol.HostHello(protocol=protocol.PROTOCOL, instance=instance, environments=offered)
        self.closed = ""

    async def send(self, frame: bytes) -> None:
        pass

    async def receive(self) -> bytes:
        if (hello := self.hello) is None:
            await asyncio.Event().wait()
        self.hello = None  # type: ignore[assignment]
        return protocol.encode(hello)

    async def close(self, reason: str) -> None:
        if reason != "bye":  # which is for a connection that has ended
            self.closed = reason
            await asyncio.Event().wait()


def test_each_silent_host_is_disconnected_although_one_hangs_in_closing() -> None:
    async def main() -> None:
        clock = VirtualClock()

        async def none(_: str) -> None:
            return None

        async def no_jobs(_: str) -> list[str]:
            return []

        settings = Settings.load({})
        hosts = EnvironmentHosts(settings, clock, RandomIds(), no_jobs, Agents(clock, bytes, none))
        stopped = [Stopped(f"host-{number}") for number in range(3)]

        async def no_answer(question: protocol.AskModel) -> protocol.ModelReply:
            raise AssertionError

        tasks = [asyncio.create_task(hosts.serve(one, f"tenant-{one.hello.instance}", no_answer)) for one in stopped]
        tasks.append(asyncio.create_task(hosts.watch()))
        await asyncio.sleep(settings.worker.suspect_seconds + 3 * settings.worker.heartbeat_seconds)
        assert all("no heartbeat" in one.closed for one in stopped), [one.closed for one in stopped]
        await cancel_all(*tasks)

    run_virtually(main())
