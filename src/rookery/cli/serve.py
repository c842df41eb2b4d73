"""``rookery serve`` and ``rookery worker``: the long-running processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rookery.aio import run_to_end
from rookery.children import child_variables, interpreter
from rookery.cli.options import FAILED, REFUSED, DataOption, folder_option, number_option
from rookery.cluster.base import preloaded
from rookery.errors import UserError, to_stderr
from rookery.settings import WORKER_SETTINGS, Settings, token_of, variable_notes


def serve(
    data: DataOption = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.", envvar="ROOKERY_HOST")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on; 0 takes a free one.")] = None,
    models: Annotated[
        str | None, typer.Option(help="Base models to load at once, comma-separated; '' for none.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Worker processes per base model.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Where workers start: local, or ray.")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of the Ray cluster's head.")] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Serve https with this certificate chain, a PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="The PEM file of its key, if that is another one.")] = None,
    plan: Annotated[str | None, typer.Option(help="A plan file, which gives workers their roles.")] = None,
) -> None:
    """Run the service until Ctrl-C: unfinished jobs resume, workers and environment hosts connect. A second Ctrl-C does
    not wait for the workers."""
    from rookery.server.launcher import serve as run_service
    from rookery.tenant_loop import TenantLoop

    settings = Settings.load(
        data=data,
        host=host,
        port=port,
        models=models,
        workers=workers,
        cluster=cluster,
        ray_address=address,
        tls_cert=tls_cert,
        tls_key=tls_key,
        plan=plan,
    )
    run_to_end(run_service(settings), _ending, TenantLoop)


def _ending(error: Exception) -> tuple[int, str]:
    """The exit code and the line of a service that ends with this error."""
    return REFUSED if isinstance(error, UserError) else FAILED, f"rookery: {error}"


def worker(
    connect: Annotated[
        str, typer.Option(help="The service's address; with commas, also its standbys'.", envvar="ROOKERY_URL")
    ],
    model: Annotated[str, typer.Option(help="The base model to load.")] = "smollm2-135m-instruct",
    roles: Annotated[str, typer.Option(help="rollout, train, or both, comma-separated.")] = "rollout,train",
    preemptible: Annotated[bool, typer.Option("--preemptible", help="This machine may vanish.")] = False,
    price: Annotated[float, number_option(help="Price of an hour of this machine, in any unit.", min=0)] = 0.0,
    address: Annotated[
        str | None, typer.Option(help="HOST[:PORT] where other workers may read artifacts from this one.")
    ] = None,
    peer_port: Annotated[
        int | None,
        typer.Option(help="The port that serves artifacts to other workers; 0 takes a free one.", min=0, max=65535),
    ] = None,
    site: Annotated[str | None, typer.Option(help="Where this machine is: ROOKERY_SITE.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Most sequences in a decode batch.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, native, transformers, or vllm.")] = None,
    vllm_url: Annotated[str | None, typer.Option(help="A running vllm serve to front, with --engine vllm.")] = None,
    name: Annotated[str | None, typer.Option(help="The worker's name; by default the machine's.")] = None,
    cache: Annotated[Path | None, folder_option(help="The folder of base models.", envvar="ROOKERY_CACHE")] = None,
) -> None:
    """Load a base model and work for a service on any machine; ROOKERY_TOKEN holds a key of the role worker, such as
    worker.token in its data folder. Ctrl-C or SIGTERM drains first."""
    settings = Settings.load(uses=WORKER_SETTINGS, cache=cache)
    to_stderr(*variable_notes())
    options = {
        "connect": connect, "model": model, "roles": roles, "cache": settings.cache, "price": price or None,
        "address": address, "peer-port": peer_port, "site": site, "max-rows": max_rows, "name": name, "engine": engine,
        "vllm-url": vllm_url,
    }  # fmt: skip
    arguments = [text for option, value in options.items() if value is not None for text in (f"--{option}", str(value))]
    if preemptible:
        arguments.append("--preemptible")
    token_of()  # refused here where there is none
    environment = preloaded({**os.environ}, settings.worker.allocator)
    command = interpreter("rookery.start", "rookery.worker.process", *arguments)
    os.execve(sys.executable, command, child_variables(environment))
