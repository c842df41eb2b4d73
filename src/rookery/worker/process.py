"""The process of a worker: ``python -m rookery.worker.process --connect URL --model NAME``.

Promises:

* The main thread does I/O only (:mod:`rookery.worker.connection`); :mod:`rookery.worker.compute` owns torch. The
  process dials at once; the base model is prepared and loaded meanwhile, however long that takes.
* SIGTERM drains: the present slice ends, sampled tokens are sent, results are uploaded, ``Draining`` is sent, and the
  exit code is 0.
* A fault that belongs to no single operation ends the process with code 1, after sampled tokens have been sent; so does
  a hub that does not answer, or a disk without room for the model. A fault that a restart cannot repair (no such model,
  wrong token) ends it with code 2. The service receives the reason of both, as far as it answers.
* With ``--die-with-parent`` it ends at once when its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rookery.aio import cancel_all, on_end_signals
from rookery.children import die_with_parent
from rookery.errors import EXIT_REFUSED, StorageFull, Unavailable, UserError, to_stderr
from rookery.folders import usable_cache
from rookery.network import service_url
from rookery.protocol.connection import RegistrationRefused
from rookery.settings import WORKER_SETTINGS, Settings, token_of
from rookery.telemetry.log import log_to_stderr
from rookery.tokenization import registry
from rookery.worker.compute import Compute
from rookery.worker.connection import ServiceConnection, WorkerOptions, report_refusal
from rookery.worker.core import WorkerCore
from rookery.worker.model.convert import prepare
from rookery.worker.progress import ProgressWatch
from rookery.worker.spinning import SparePool, SpinControl
from rookery.worker.transfer.http import one_line
from rookery.worker.transfer.peers import listen

log = logging.getLogger("rookery.worker")

SWITCH_SECONDS = 0.001
"""The I/O thread waits so long at most for the compute thread to release Python's lock. At Python's own five
milliseconds, the upload of a small version, which takes the lock some forty times, waited 0.2 s while the compute
thread was busy."""

FAILED = 1
"""Exit code: a fault after which a restart may succeed."""


async def run(options: WorkerOptions, settings: Settings, listening: socket.socket | None) -> tuple[int, bool]:
    """Serve until a signal or a fault: the exit code, and whether the compute thread is still in a slice. Adapters are
    served to other workers on ``listening``. Raises ``UserError`` for an unusable cache folder."""
    loop = asyncio.get_running_loop()
    signalled, output = asyncio.Event(), asyncio.Event()
    on_end_signals(signalled.set)
    prepare_model = partial(prepare, options.model, settings.cache)
    compute = Compute(
        prepare_model,
        settings,
        lambda: loop.call_soon_threadsafe(output.set),
        trains="train" in options.roles,
    )
    watch, spinning = ProgressWatch(compute), SpinControl(SparePool(), compute.crowd)
    connection = ServiceConnection(options, settings, compute, listening, watch)
    compute.start()
    ended = _in_loop(compute.ended)

    def on_ready(ready: asyncio.Future[WorkerCore]) -> None:
        if ready.exception() is None:
            connection.on_loaded(ready.result(), registry.status(settings.cache, options.model).hash)

    _in_loop(compute.ready).add_done_callback(on_ready)

    async def collect() -> None:
        while True:
            await output.wait()
            output.clear()
            connection.collect()

    running = (connection.serve(), collect(), connection.housekeeping(), watch.run(), spinning.run(), signalled.wait())
    tasks = [asyncio.create_task(coroutine) for coroutine in running]
    try:
        await asyncio.wait({ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        compute.stop()
        log.info("draining")
        end = loop.time() + settings.worker.drain_seconds
        await asyncio.wait({ended}, timeout=settings.worker.drain_seconds)
        failure, left = compute.failure, max(0.0, end - loop.time())
        await connection.drain(left, one_line(failure) if failure else "", refused=isinstance(failure, UserError))
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
    except (StorageFull, Unavailable) as error:
        log.error("%s", error)
        code = FAILED
    except Exception:
        log.exception("the worker ends after a fault")
        code = FAILED
    finally:
        await cancel_all(*tasks)
        await connection.close()
    return code, not compute.ended.done()


def _in_loop(future: Future[Any]) -> asyncio.Future[Any]:
    """``future`` as a future of this loop; a cancellation of one does not cancel the other."""
    return asyncio.ensure_future(asyncio.shield(asyncio.wrap_future(future)))


def bases(connect: str) -> str:
    """The HTTP addresses of ``--connect``, comma-separated. Raises ``UserError``."""
    return ",".join(service_url(address.strip(), "--connect") for address in connect.split(","))


def main(argv: list[str] | None = None) -> int:
    """Run a worker; the exit code."""
    parser = argparse.ArgumentParser(prog="rookery worker", description="Serve a base model to a Rookery service.")
    parser.add_argument(
        "--connect", required=True, help="the service's address, or several of a service and its standbys"
    )
    parser.add_argument("--model", required=True, help="a catalogue name, a local folder or a hub id")
    parser.add_argument("--cache", type=Path, help="folder for base models and adapters")
    parser.add_argument("--roles", default="rollout,train", help="roles of this worker (default: rollout,train)")
    parser.add_argument("--preemptible", action="store_true", help="this machine may vanish at any moment")
    parser.add_argument("--price", type=float, default=0.0, help="price of an hour of this machine, in any unit")
    parser.add_argument("--address", help="HOST[:PORT] where other workers may read artifacts from this one")
    parser.add_argument("--peer-port", type=int, help="port that serves artifacts to other workers; 0: any free port")
    parser.add_argument("--site", help="where this machine is (default: ROOKERY_SITE)")
    parser.add_argument("--engine", help="auto, native, transformers, or vllm")
    parser.add_argument("--vllm-url", help="a running vllm serve to front, with --engine vllm")
    parser.add_argument("--max-rows", type=int, help="sequences that decode at the same time")
    parser.add_argument(
        "--name", default=f"{socket.gethostname()}-{os.getpid()}", help="the worker's name in the service"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input ends")
    given = parser.parse_args(argv)
    if given.die_with_parent:
        die_with_parent(lambda: os._exit(FAILED))  # no process is left to send output to
    sys.setswitchinterval(SWITCH_SECONDS)
    settings: Settings | None = None
    try:
        settings = Settings.load(
            uses=WORKER_SETTINGS,
            cache=given.cache,
            max_rows=given.max_rows,
            inference_engine=given.engine,
            vllm_url=given.vllm_url,
            site=given.site,
        )
        log_to_stderr(settings.server.log_level)
        usable_cache(settings.cache)
        base = bases(given.connect)
        roles = given.roles.split(",")
        if not set(roles) <= {"rollout", "train"}:
            raise UserError(f"--roles: given {given.roles!r}, allowed are rollout, train, or both with a comma")
        if not given.price >= 0:
            raise UserError(f"--price: invalid price {given.price} per hour, must be 0 or more")
        engines = (settings.engine.inference_engine, settings.training.trainer)
        known = registry.usable(settings.cache, given.model, *engines)
        log.info("base model %s is %s", given.model, known.state)
        listening, address = listen(base.split(",")[0], given.address, given.peer_port)
        options = WorkerOptions(
            base=base,
            token=token_of(),
            model=given.model,
            roles=roles,
            kind="preemptible" if given.preemptible else "reserved",
            name=given.name,
            price=given.price,
            address=address,
        )
        code, computing = asyncio.run(run(options, settings, listening))
    except (StorageFull, Unavailable) as error:  # it may pass
        to_stderr(error)
        return FAILED
    except UserError as error:
        to_stderr(error)
        _report(given, settings, str(error))
        return EXIT_REFUSED
    if computing:
        # A slice outlasted the drain. Its thread cannot be ended, and torch may crash while the interpreter shuts down.
        logging.shutdown()
        os._exit(code)
    return code


def _report(given: argparse.Namespace, settings: Settings | None, reason: str) -> None:
    """Tell the service why this worker does not begin, as far as its options say where that is."""
    settings = settings if settings is not None else Settings()
    with contextlib.suppress(UserError):
        options = WorkerOptions(
            base=bases(given.connect),
            token=token_of(),
            model=given.model,
            roles=["rollout", "train"],
            kind="preemptible" if given.preemptible else "reserved",
            name=given.name,
        )
        asyncio.run(report_refusal(options, settings.trusted, settings.engine.max_rank, reason))


if __name__ == "__main__":
    sys.exit(main())
