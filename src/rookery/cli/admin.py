"""The administrator's commands: ``rookery tenants …``, ``workers``, ``costs``, ``backup``, ``restore``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from rookery.cli.options import Cli, DataOption, duration, path_argument, with_options
from rookery.cli.output import print_json, show, time_of
from rookery.client.connection import Record
from rookery.errors import UserError, count_of, short
from rookery.settings import STORAGE_SETTINGS, Settings
from rookery.telemetry.rows import Rows, columns
from rookery.telemetry.table import memory_table, worker_table

app = typer.Typer(help="Tenants, their keys, what they cost. Needs the administrator's key.", no_args_is_help=True)

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id or name.")]


@app.command("list")
@with_options
def list_tenants(cli: Cli) -> None:
    """Every tenant with its costs, today's tokens, and the limits that are not the service's settings."""
    with cli.client() as client:
        found = client.tenants()  # first: a tenant that is added meanwhile has costs and no row
        costs = {row.tenant: row.cost for row in client.costs().tenants}
        tenants = [{**row, "cost": costs[row.id]} for row in found if row.id in costs]
    numbers = ("cost", "reserved", "preemptible", "compute hours", "tokens today")
    table = Rows(columns(("tenant", "id", "since"), numbers, ("limits",)))
    for row in tenants:
        cost = costs[row["id"]]
        shown = (cost.cost, cost.reserved, cost.preemptible, cost.seconds / 3600)
        limits = ", ".join(f"{name} {value:g}" for name, value in row["overrides"].items())
        table.add(row["name"], row["id"], time_of(row["created"]), *shown, f"{row['tokens_today']:,}", limits)
    cli.show_rows(tenants, lambda: table)


@app.command("add")
@with_options
def add(cli: Cli, name: Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.")]) -> None:
    """Create a tenant. It needs a key next."""
    with cli.client() as client:
        made = client.add_tenant(name)
    cli.show(made, f"{made.name} is tenant {made.id}; rookery tenants key {made.name} creates a key")


@app.command("rename")
@with_options
def rename(
    cli: Cli, tenant: Tenant, name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")]
) -> None:
    """Give a tenant another name."""
    with cli.client() as client:
        row = client.rename_tenant(tenant, name)
    cli.show(row, f"{row.id} is called {row.name}")


@app.command("delete")
@with_options
def delete(
    cli: Cli,
    tenant: Tenant,
    force: Annotated[bool, typer.Option("--force", help="Cancel its jobs that have not ended.")] = False,
) -> None:
    """Delete a tenant with its keys, jobs, versions and uploads. What it cost stays in the costs."""
    with cli.client() as client:
        client.delete_tenant(tenant, force=force)
    cli.show({"deleted": tenant}, f"{tenant} is deleted")


@app.command("limit")
@with_options
def limit(
    cli: Cli,
    tenant: Tenant,
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="jobs, waiting_jobs, requests, request_tokens, queued_bytes, adapters, bytes, tokens_per_day, models,"
            " hosts, metadata_bytes, uploads, database_bytes, service_share, requests_per_second or weight; the value"
            " default is the service's setting.",
        ),
    ] = None,
) -> None:
    """Change a tenant's limits, such as jobs=4 weight=2, and show them. Jobs beyond one wait; running ones continue."""
    given: dict[str, float | None] = {}
    for text in limits or []:
        name, _, value = text.partition("=")
        try:
            given[name] = number = None if value == "default" else float(value)
            if number is not None and not math.isfinite(number):
                raise ValueError("no limit")
        except ValueError:
            raise UserError(f"{short(text)}: give NAME=NUMBER or NAME=default, such as jobs=4") from None
    with cli.client() as client:
        made = client.limit_tenant(tenant, **given)
    shown = [f"{name} {value:.15g}{'*' * (name in made.overrides)}" for name, value in made.limits.items()]
    cli.show(made, f"{made.name}: {', '.join(shown)} (*: not the service's setting)")


@app.command("keys")
@with_options
def keys(cli: Cli, tenant: Tenant) -> None:
    """A tenant's keys: labels and ids, never their texts."""
    with cli.client() as client:
        rows = client.keys(tenant)
    table = Rows(columns(("key", "role", "created", "expires", "revoked"), notes=("label",)))
    for row in rows:
        times = [time_of(seconds or 0) for seconds in (row.created, row.expires, row.revoked)]
        table.add(row.id, row.role, *times, row.label)
    cli.show_rows(rows, lambda: table, f"no keys; rookery tenants key {tenant} creates one")


@app.command("key")
@with_options
def new_key(
    cli: Cli,
    tenant: Tenant,
    label: Annotated[str, typer.Option(help="A note on the key's purpose.")] = "",
    role: Annotated[str | None, typer.Option(help="admin, tenant, worker or host.")] = None,
    expires: Annotated[str | None, typer.Option(help="Not valid after this time: 90m, 12h or 30d.")] = None,
) -> None:
    """Create a key for a tenant. It is shown once: keep it."""
    seconds = None
    if expires is not None:
        seconds = duration("--expires", expires)
    with cli.client() as client:
        made = client.add_key(tenant, label, role=role, lifetime_seconds=seconds)
    cli.show(made, made.key)


@app.command("revoke")
@with_options
def revoke(
    cli: Cli,
    tenant: Tenant,
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as rookery tenants keys shows it.")],
) -> None:
    """Revoke a key. Its tenant's data stays."""
    with cli.client() as client:
        key = client.revoke_key(tenant, id)
    cli.show(key, f"key {key.id} ({key.label or 'no label'}) is revoked")


@with_options
def costs(cli: Cli) -> None:
    """The cost of the workers by base model and kind: used by tenants, idle, and in progress. Needs the administrator's
    key."""
    with cli.client() as client:
        found = client.costs()
    table = Rows(columns(("base model", "kind"), ("hours", "cost", "used", "idle", "in progress")))
    for row in found.workers:
        numbers = (row.hours, row.cost, row.used, row.idle, row.waiting)
        table.add(row.model, row.kind, *(f"{number:.4g}" for number in numbers))
    if cli.json:
        print_json(found)
    else:
        show(table if found.workers else "no costs yet: no worker has connected")


@with_options
def workers(cli: Cli) -> None:
    """The workers that have connected, in any state, and how many rollout workers the load of the asynchronous jobs
    wants. Needs the administrator's key."""
    with cli.client() as client:
        rows, pools = client.workers(), client.pools()
    if cli.json:
        print_json({"workers": rows, "pools": pools})
    elif not rows:
        show("no worker has connected; rookery worker --connect URL starts one")
    else:
        lines = ["", *map(_pool_line, pools)] if pools else []
        show(Group(worker_table(rows), "", memory_table(rows), *lines))


def _pool_line(pool: Record) -> str:
    wanted = "not known before an asynchronous job has taken some steps" if pool.wanted is None else pool.wanted
    bounds = "their number is fixed" if pool.most is None else f"from {pool.least} to {pool.most} are started"
    return f"{pool.model}: {count_of(pool.workers, 'rollout worker')}; wanted: {wanted}; {bounds}"


def backup(
    folder: Annotated[Path, path_argument(metavar="DIR", help="The backup: a new folder, best on another disk.")],
    data: DataOption = None,
) -> None:
    """Back up database and artifacts, while the service runs or not. The backup contains keys: keep it private."""
    from rookery.storage.artifacts import Place
    from rookery.storage.backup import back_up

    settings = Settings.load(uses=STORAGE_SETTINGS, data=data)
    count = back_up(settings.data, settings.server.database, folder.absolute(), Place(*settings.server.artifacts))
    show(f"{folder}: the database and {count_of(count, 'artifact')} of {settings.data}")


def restore(
    folder: Annotated[Path, path_argument(metavar="DIR", help="A backup.")],
    data: DataOption = None,
) -> None:
    """Restore a backup into a new data folder (and the empty database that ROOKERY_DATABASE names)."""
    from rookery.storage.artifacts import Place
    from rookery.storage.backup import restore

    settings = Settings.load(uses=STORAGE_SETTINGS, data=data)
    count = restore(folder.absolute(), settings.data, settings.server.database, Place(*settings.server.artifacts))
    show(
        f"{settings.data}: the database and {count_of(count, 'artifact')}; rookery serve --data {settings.data} resumes"
        " the jobs"
    )
