"""Hosts on one machine: network namespaces with an address each, joined by a link, without a shared loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.support.waiting import until

SUBNET = "10.77.0"
LEAVE_SECONDS = 10.0


def missing() -> str:
    """Why this machine cannot have such hosts, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return "" if shutil.which("ip") else "ip (Debian's iproute2) is not installed"


class Host:
    """A network namespace with a loopback and an address, whose commands see ``folder`` as ``/tmp/ray``."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name = name
        self.address = address
        self._folder = folder
        folder.mkdir(parents=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")

    def command(self, arguments: Sequence[str]) -> list[str]:
        script = 'mount --bind "$0" /tmp/ray && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", script, str(self._folder), *arguments]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                self.command(arguments), env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def output(self, arguments: Sequence[str], environment: Mapping[str, str], seconds: float = 60) -> str:
        """The output of a command. Raises CalledProcessError with its standard error in ``output``."""
        done = subprocess.run(
            self.command(arguments), env=dict(environment), capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, list(arguments), done.stdout + done.stderr)
        return done.stdout

    def kill(self) -> None:
        """End everything that runs here at once, as a power cut would. The link is down first: nothing says goodbye."""
        with suppress(subprocess.CalledProcessError):
            run("ip", "-n", self.name, "link", "set", "eth0", "down")

        def empty() -> bool:
            pids = run("ip", "netns", "pids", self.name).split()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            return not pids

        until(empty, "its processes do not end", patience=LEAVE_SECONDS)

    def restore(self) -> None:
        """The link is up again."""
        run("ip", "-n", self.name, "link", "set", "eth0", "up")

    def remove(self) -> None:
        self.kill()
        run("ip", "netns", "del", self.name)


def two_hosts(folder: Path) -> tuple[Host, Host]:
    """Both ends of one link."""
    hosts = [Host(f"rookery-{os.getpid()}-{end}", f"{SUBNET}.{end}", folder / str(end)) for end in (1, 2)]
    one, two = hosts
    run("ip", "-n", one.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", two.name)
    for host in hosts:
        run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        run("ip", "-n", host.name, "link", "set", "eth0", "up")
    return one, two


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
