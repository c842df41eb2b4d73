"""``rookery workers``: who computes, in which state, at what price."""

from __future__ import annotations

from rookery.cli.common import Data, Json, Key, Url, client_of, console, print_json
from rookery.telemetry.table import worker_table


def workers(url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """The workers that dialled in, in whatever state. Needs the administrator's key."""
    with client_of(url, key, data) as client:
        rows = client.workers()
    if json:
        for row in rows:
            print_json(row)
    elif rows:
        console().print(worker_table(rows))
    else:
        console().print("no worker has dialled in; rookery worker --connect URL starts one")
