"""Ports for servers that are given one before they start."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

LOWEST = 10_000

_turns = itertools.count()


def free_port() -> int:
    """A port that nobody uses, below those that the system gives to outgoing connections and to servers without one:
    nothing takes it before its server starts, or while that is started again. No two calls of a process give the same,
    and processes begin at different ones."""
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for turn in itertools.islice(_turns, highest - LOWEST):
        port = LOWEST + (101 * os.getpid() + turn) % (highest - LOWEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")
