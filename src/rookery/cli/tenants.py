"""``rookery tenants …``: who uses the service, with which keys, and what it cost. For the administrator's key."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from rookery.cli.common import Data, Json, Key, Url, client_of, console, plain_table, print_json, show, time_of

app = typer.Typer(help="Tenants, their keys, what they cost. Needs the administrator's key.", no_args_is_help=True)

Tenant = Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id, or its name where only one has it.")]


@app.command("list")
def list_tenants(url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """Every tenant, and what it used."""
    with client_of(url, key, data) as client:
        tenants, costs = client.tenants(), {row.tenant: row.cost for row in client.costs().tenants}
    if json:
        for row in tenants:
            print_json({**row, "cost": costs.get(row.id)})
        return
    table = _table(("tenant", "since", "id"), ("cost", "reserved", "preemptible", "compute hours"))
    for row in tenants:
        cost = costs[row.id]
        figures = (cost.cost, cost.reserved, cost.preemptible, cost.seconds / 3600)
        table.add_row(row.name, time_of(row.created), row.id, *(f"{figure:.4g}" for figure in figures))
    console().print(table)


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    url: Url = None,
    key: Key = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Make a tenant. It needs a key next."""
    with client_of(url, key, data) as client:
        made = client.add_tenant(name)
    show(made, json, f"{made.name} is tenant {made.id}; rookery tenants key {made.name} makes a key")


@app.command("keys")
def keys(tenant: Tenant, url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """A tenant's keys: labels and ids, never their texts."""
    with client_of(url, key, data) as client:
        rows = client.keys(tenant)
    if json:
        for row in rows:
            print_json(row)
        return
    table = _table(("key", "label", "made", "revoked"))
    for row in rows:
        table.add_row(row.id, row.label, time_of(row.created), time_of(row.revoked or 0))
    console().print(table)


@app.command("key")
def new_key(
    tenant: Tenant,
    label: Annotated[str, typer.Option(help="What it is for.")] = "",
    url: Url = None,
    key: Key = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """Make a key for a tenant. It is shown once: keep it."""
    with client_of(url, key, data) as client:
        made = client.add_key(tenant, label)
    show(made, json, made.key)


@app.command("revoke")
def revoke(
    tenant: Tenant,
    id: Annotated[str, typer.Argument(metavar="ID", help="The key's id, as rookery tenants keys shows it.")],
    url: Url = None,
    key: Key = None,
    data: Data = None,
    json: Json = False,
) -> None:
    """From now on a key opens nothing. What its tenant has stays."""
    with client_of(url, key, data) as client:
        gone = client.revoke_key(tenant, id)
    show(gone, json, f"key {gone.id} ({gone.label or 'no label'}) is revoked")


def costs(url: Url = None, key: Key = None, data: Data = None, json: Json = False) -> None:
    """What the workers cost, by base model and kind: used by tenants, idle, and under way. Needs the administrator's
    key."""
    with client_of(url, key, data) as client:
        told = client.costs()
    if json:
        print_json(told)
        return
    table = _table(("base model", "kind"), ("hours", "cost", "used", "idle", "under way"))
    for row in told.workers:
        figures = (row.hours, row.cost, row.used, row.idle, row.waiting)
        table.add_row(row.model, row.kind, *(f"{figure:.4g}" for figure in figures))
    console().print(table)


def _table(left: tuple[str, ...], right: tuple[str, ...] = ()) -> Table:
    table = plain_table()
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    return table
