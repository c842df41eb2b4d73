"""The process that hosts built-in environments: ``python -m rookery.environments.process --connect URL``, with
its key in ``ROOKERY_TOKEN``.

With ``--die-with-parent`` it ends when its standard input ends, which is when the parent process is gone. SIGTERM and
Ctrl-C end it too. It exits with 0 in these cases and with 1 when the service refuses it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from functools import partial

from rookery.aio import die_with_parent
from rookery.environments.builtins import BUILTINS
from rookery.environments.host import Host
from rookery.errors import UserError
from rookery.settings import Settings, token_of


async def serve(url: str, settings: Settings, *, end_with_parent: bool) -> None:
    """Hosts the built-ins until a signal ends it. Raises :class:`UserError` when the service refuses."""
    builtins = {f"builtin:{id}": builtin for id, builtin in BUILTINS.items()}
    host = Host(url, token_of(), builtins, ca_file=settings.trusted)
    running = asyncio.create_task(host.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # Windows lacks it; Ctrl-C cancels there
            loop.add_signal_handler(number, running.cancel)
    if end_with_parent:
        die_with_parent(partial(_end, loop, running))
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _end(loop: asyncio.AbstractEventLoop, running: asyncio.Task[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(running.cancel)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rookery.environments.process", description="Host built-ins.")
    parser.add_argument("--connect", required=True, metavar="URL", help="the service's address")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input ends")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = Settings.load()
        logging.getLogger("rookery").setLevel(settings.server.log_level)  # others log requests with their keys
        asyncio.run(serve(arguments.connect, settings, end_with_parent=arguments.die_with_parent))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
