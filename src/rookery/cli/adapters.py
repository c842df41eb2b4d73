"""``rookery adapters``: download a version, push it to the Hugging Face Hub, merge it into its base model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from rookery.children import child_variables, interpreter
from rookery.cli.options import Cli, check_child, path_argument, path_option, with_options
from rookery.client.client import Client
from rookery.client.job import AdapterFolder, Job, check_lora, first_trained
from rookery.errors import UserError, short
from rookery.folders import temporary_folder, usable_cache

app = typer.Typer(help="Download adapters, push them to the Hugging Face Hub, merge them.", no_args_is_help=True)

Version = Annotated[str, typer.Argument(metavar="JOB[@VERSION]", help="A job, its newest version or this one.")]
Policy = Annotated[str | None, typer.Option(help="The policy; by default the first that trains.")]


def _found(client: Client, job: str, policy: str | None) -> tuple[Job, AdapterFolder]:
    """The job, and the adapter of the version that ``JOB[@VERSION]`` names."""
    name, at, version = job.partition("@")
    if at and version != "latest" and not (version.isascii() and version.isdecimal()):
        raise UserError(f"{short(job)}: after the @ comes a version's number, or latest")
    number = int(version) if version.isdecimal() else None
    found = client.job(name.removesuffix(":latest"))
    return found, found.adapter(number, policy)


@app.command("download")
@with_options
def download(
    cli: Cli,
    job: Version,
    folder: Annotated[Path, path_argument(metavar="DIR", help="Where the files of the PEFT folder are written.")],
    policy: Policy = None,
) -> None:
    """Download a version's PEFT folder: transformers, PEFT and vLLM load it."""
    with cli.client() as client:
        found, adapter = _found(client, job, policy)
        written = adapter.download(folder)
    shown = sorted(adapter.files)
    cli.show(
        {"job": found.id, "version": adapter.version, "folder": str(written), "files": shown},
        f"{written}: {', '.join(shown)}",
    )


@app.command("push")
@with_options
def push(
    cli: Cli,
    job: Version,
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The model on the Hub; made if it is not there.")],
    policy: Policy = None,
    license: Annotated[str | None, typer.Option(help="Licence in the model card, such as apache-2.0.")] = None,
    public: Annotated[bool, typer.Option("--public", help="A model that is made is public, else private.")] = False,
) -> None:
    """Push a version with a model card to the Hugging Face Hub, from this machine, with its HF_TOKEN."""
    with cli.client() as client:
        found, adapter = _found(client, job, policy)
        address = adapter.push(repo, license=license, private=not public)
    cli.show({"job": found.id, "version": adapter.version, "url": address}, f"pushed to {address}")


@app.command("export")
@with_options
def export(
    cli: Cli,
    job: Version,
    merge: Annotated[Path | None, path_option(help="New folder for the base model with the adapter merged.")] = None,
    gguf: Annotated[Path | None, path_option(help="New file for the adapter as GGUF, for llama.cpp.")] = None,
    policy: Policy = None,
) -> None:
    """Write a version merged into its base model, which is prepared on this machine if it is not, or as GGUF."""
    targets = {option: path for option, path in (("--merge", merge), ("--gguf", gguf)) if path is not None}
    if not targets:
        raise UserError("adapters export: give --merge DIR, --gguf FILE or both; rookery adapters download has PEFT's")
    for option, path in targets.items():
        if path.exists():
            raise UserError(f"{option}: {path} exists; give a new path")
    usable_cache(cli.settings.cache)
    with temporary_folder("rookery-export-") as folder:
        with cli.client() as client:
            found, adapter = _found(client, job, policy)
            spec = found.show().spec
            named = policy or first_trained(spec.policies)
            check_lora(spec.policies, named, "its files need no merge, and llama.cpp converts them")
            files = adapter.download(folder)
        model = spec.policies.get(named, {}).get("base_model")
        command = interpreter(
            "rookery.worker.model.exports", model or spec.base_model, "--cache", str(cli.settings.cache),
            "--adapter", str(files),
        )  # fmt: skip
        for option, path in targets.items():
            command += [option, str(path.absolute())]
        done = subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", env=child_variables()
        )
    check_child(done, "adapters export")
    written = {option.removeprefix("--"): str(path) for option, path in targets.items()}
    cli.show({"job": found.id, "version": adapter.version, **written}, "written: " + ", ".join(written.values()))
