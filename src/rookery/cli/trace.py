"""``rookery trace``: the timeline as a file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rookery.cli.options import Cli, duration, path_argument, with_options
from rookery.errors import UserError


@with_options
def trace(
    cli: Cli,
    file: Annotated[Path, path_argument(metavar="FILE", help="The JSON file to write, such as rookery.trace.json.")],
    job: Annotated[str | None, typer.Option(help="Only this job; all other work is busy time.")] = None,
    last: Annotated[str | None, typer.Option(help="Only the time before now, such as 10m; else all.")] = None,
) -> None:
    """Write what workers, environments and the trainer did into a trace file that https://ui.perfetto.dev opens."""
    seconds = None if last is None else duration("--last", last)
    with cli.client() as client:
        try:
            written = (client if job is None else client.job(job)).trace(file, seconds=seconds)
        except OSError as error:
            raise UserError(f"{file}: cannot be written ({error.strerror}); give another file") from None
    size = written.stat().st_size
    cli.show({"file": str(written), "bytes": size}, f"{written} ({size:,} bytes): open it at https://ui.perfetto.dev")
