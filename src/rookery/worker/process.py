"""A worker's process: ``python -m rookery.worker.process --connect URL --model NAME``.

Promises:

* The main thread does I/O only (:mod:`rookery.worker.connection`); :mod:`rookery.worker.compute` owns torch. It dials
  in at
  once; the base model is prepared and loaded beside that, however long it takes.
* SIGTERM drains: the slice at work ends, what was sampled is sent, results are uploaded, ``Bye``, exit code 0.
* A failure that is no single operation's ends the process with code 1, after what was sampled has been sent; so does a
  hub that does not answer. What trying again cannot mend (no such model, wrong token) ends it with code 2.
* With ``--die-with-parent`` it ends at once when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from rookery.aio import die_with_parent
from rookery.errors import EXIT_REFUSED, Unavailable, UserError
from rookery.protocol.connection import RegistrationRefused
from rookery.settings import TOKEN_VARIABLE, Settings, token_of
from rookery.tokenization import registry
from rookery.worker.compute import Compute, WorkerCore
from rookery.worker.connection import ServiceConnection, WorkerOptions
from rookery.worker.model.convert import prepare
from rookery.worker.transfer.cache import ADAPTERS
from rookery.worker.transfer.peers import PeerServer, listen

log = logging.getLogger("rookery.worker")

FAILED = 1
"""Exit code: something broke; starting again can help."""


async def run(options: WorkerOptions, settings: Settings, listening: socket.socket | None) -> tuple[int, bool]:
    """Serve until told to end: the exit code, and whether the compute thread is still in a slice. On ``listening``
    adapters are lent to other workers."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    brought = asyncio.Event()
    fetch = partial(prepare, options.model, settings.cache)
    compute = Compute(fetch, settings, options.model, lambda: loop.call_soon_threadsafe(brought.set))
    lender = PeerServer(settings.cache / ADAPTERS, listening) if listening is not None else None
    link = ServiceConnection(options, settings, compute, lender)
    compute.start()
    if lender is not None:
        lender.start()
    over = _wrap(compute.over)

    def loaded(ready: asyncio.Future[WorkerCore]) -> None:
        if ready.exception() is None:
            link.loaded(ready.result(), registry.status(settings.cache, options.model).hash)

    _wrap(compute.ready).add_done_callback(loaded)

    async def collect() -> None:
        while True:
            await brought.wait()
            brought.clear()
            link.collect()

    tasks = [asyncio.create_task(part) for part in (link.serve(), collect(), link.housekeeping(), told.wait())]
    try:
        await asyncio.wait({over, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        compute.stop()
        log.info("draining")
        await asyncio.wait({over}, timeout=settings.worker.drain_seconds)
        await link.finish()
        for task in tasks:
            if task.done():
                task.result()
        if compute.failure is not None:
            raise compute.failure
        code = 0
    except RegistrationRefused as refusal:
        log.error("the service refuses this worker: %s", refusal)
        code = EXIT_REFUSED
    except UserError as error:
        log.error("%s", error)
        code = EXIT_REFUSED
    except Unavailable as error:
        log.error("%s", error)
        code = FAILED
    except Exception:
        log.exception("this worker ends")
        code = FAILED
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await link.close()
        if lender is not None:
            await lender.stop()
    return code, not compute.over.done()


def _wrap(future: Future[Any]) -> asyncio.Future[Any]:
    """``future`` as a future of this loop; cancelling one does not cancel the other."""
    return asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(future)))


def base_url(address: str) -> str:
    """The HTTP address of what a user may write with any of ws, wss, http, https, or without a scheme."""
    url = urlsplit(address if "://" in address else f"http://{address}")
    scheme = {"ws": "http", "wss": "https"}.get(url.scheme, url.scheme)
    if scheme not in ("http", "https") or not url.netloc:
        raise UserError(f"--connect: given {address!r}, allowed is an address like http://host:7077")
    return urlunsplit((scheme, url.netloc, url.path.rstrip("/"), "", ""))


def main(argv: list[str] | None = None) -> int:
    """Runs a worker; the exit code."""
    parser = argparse.ArgumentParser(prog="rookery worker", description="Serve a base model to a Rookery service.")
    parser.add_argument("--connect", required=True, help="the service's address, such as http://host:7077")
    parser.add_argument(
        "--token", help=f"the worker token (or in {TOKEN_VARIABLE}); it lies in the service's data folder"
    )
    parser.add_argument("--model", required=True, help="a catalogue name, a local folder or a hub id")
    parser.add_argument("--cache", type=Path, help="where base models and adapters are kept")
    parser.add_argument("--roles", default="rollout,train", help="what this worker does (default: rollout,train)")
    parser.add_argument("--preemptible", action="store_true", help="this machine may vanish at any moment")
    parser.add_argument("--price", type=float, default=0.0, help="what an hour of this machine costs, in your unit")
    parser.add_argument("--address", help="HOST[:PORT] where other workers may pull adapters from this one")
    parser.add_argument("--peer-port", type=int, help="the port to lend adapters on; 0 takes a free one")
    parser.add_argument("--max-rows", type=int, help="sequences that decode at the same time")
    parser.add_argument("--name", default=f"{socket.gethostname()}-{os.getpid()}", help="what the service calls it")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input ends")
    given = parser.parse_args(argv)
    if given.die_with_parent:
        die_with_parent(lambda: os._exit(FAILED))  # nobody is left to send anything to
    try:
        settings = Settings.load(cache=given.cache, max_rows=given.max_rows)
        logging.basicConfig(level=settings.server.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line for every request
        base = base_url(given.connect)
        roles = given.roles.split(",")
        if not set(roles) <= {"rollout", "train"}:
            raise UserError(f"--roles: given {given.roles!r}, allowed are rollout, train, or both with a comma")
        if not given.price >= 0:
            raise UserError(f"--price: given {given.price}, allowed is 0 or more")
        known = registry.status(settings.cache, given.model)
        if known.state == "refused":
            raise UserError(known.reason)
        log.info("base model %s is %s", given.model, known.state)
        listening, address = listen(base, given.address, given.peer_port)
        options = WorkerOptions(
            base=base,
            token=token_of(given.token),
            model=given.model,
            roles=roles,
            kind="preemptible" if given.preemptible else "reserved",
            name=given.name,
            price=given.price,
            address=address,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    code, computing = asyncio.run(run(options, settings, listening))
    if computing:
        # A slice outlasted the drain. Its thread cannot be ended, and torch may crash in an interpreter that is being
        # torn down under it.
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
