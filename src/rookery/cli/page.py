"""``rookery open``: the page in a browser."""

from __future__ import annotations

import webbrowser
from typing import Annotated

import typer

from rookery.cli.options import Cli, with_options
from rookery.cli.output import show


@with_options
def open_page(
    cli: Cli,
    browser: Annotated[bool, typer.Option(help="Open a browser; else only print the link.")] = True,
) -> None:
    """Open the service's page in a browser, signed in with this key: on the service's machine the administrator's. The
    link works once, within a minute."""
    with cli.client() as client:
        link = client.sign_in_link()
    if cli.json or not browser:
        cli.show({"link": link}, link)
    elif webbrowser.open(link):
        show(f"the page is open in your browser: {client.url}")
    else:
        show(f"no browser here; open this within a minute: {link}")
