"""``rookery jobs …``: list, show, follow, control and delete jobs. ``rookery uploads …``: list and delete uploads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rookery.cli.follow import Follower
from rookery.cli.options import ENDINGS, INTERRUPTED, Cli, path_argument, with_options
from rookery.cli.output import console, fields, is_terminal, print_json, show, time_of
from rookery.cli.steps import StepLines
from rookery.client.connection import Record
from rookery.client.report import outcome, report, reward_text
from rookery.errors import count_of
from rookery.folders import replaced
from rookery.telemetry.numbers import evaluation_text
from rookery.telemetry.rows import Rows, columns, printable
from rookery.telemetry.table import job_line, job_list, policy_figures, sparkline

app = typer.Typer(help="List, show, follow, control and delete jobs.", no_args_is_help=True)
uploads = typer.Typer(help="List and delete uploaded datasets and adapters.", no_args_is_help=True)


Name = Annotated[
    str, typer.Argument(metavar="JOB", help="A job's id or name: the newest of that name; NAME~1 is the one before.")
]


@app.command("list")
@with_options
def list_jobs(cli: Cli) -> None:
    """All jobs of this key's tenant."""
    with cli.client() as client:
        views = client.views()
    cli.show_rows(views, lambda: job_list(views), "no jobs yet; rookery run job.yaml submits one")


@app.command("show")
@with_options
def show_job(cli: Cli, job: Name) -> None:
    """One job: its progress, policies, counters and evaluations."""
    with cli.client() as client:
        found = client.job(job)
        view, evaluations = found.show(), found.evaluations()
    if cli.json:
        print_json({**view, "evaluations": evaluations})
        return
    show(job_line(view))
    several = len(view.spec.policies) > 1
    lines: list[tuple[str, Any]] = [
        ("id", view.id),
        ("base model", view.base_model),
        ("reason", view.reason),
        ("submitted", time_of(view.created)),
        ("started", time_of(view.started)),
        ("finished", time_of(view.finished)),
        ("tokens", f"{view.tokens:,}"),
        (f"rewards of {view.policy}" if view.get("policy") else "rewards", sparkline(view.rewards, 64)),
        *cost_lines(view.cost),
        *_policy_lines(view),
        *_counter_lines(view.counters),
        *((f"evaluation of {e.policy + ' ' if several else ''}version {e.version}", evaluation_text(e))
          for e in evaluations),
    ]  # fmt: skip
    fields(lines)


def _counter_lines(counters: Mapping[str, int]) -> list[tuple[str, str]]:
    """A line for each counter that is not 0; where it counts for single policies, with the part of each."""
    lines = []
    for name, count in counters.items():
        if count and name != "tokens" and "/" not in name:
            parts = [(key.partition("/")[2], part) for key, part in counters.items() if key.startswith(f"{name}/")]
            whose = ", ".join(f"{policy} {part}" for policy, part in parts if part)
            lines.append((name.replace("_", " "), f"{count} ({whose})" if whose else str(count)))
    return lines


def _policy_lines(view: Record) -> list[tuple[str, str]]:
    """A line for each policy of a job, in the job's order."""
    known, lines = {policy.name: policy for policy in view.policies}, []
    for name, about in view.spec.policies.items():
        policy = known.get(name)
        if policy is None:
            line = "the base model"
        elif policy.follows:
            line = (
                f"version {policy.version} of {policy.follows}, swapped in every"
                f" {count_of(about.follows.every, 'step')}"
            )
        else:
            size = f"rank {policy.rank}, alpha {policy.alpha:g}" if policy.rank else "all parameters"
            line = f"version {policy.version}, {size}" + ("" if about.get("train", True) else ", frozen")
            line += "".join(f", {name} {number}" for name, number in policy_figures(policy))
        lines.append((f"policy {name}", line + (f", on {about.base_model}" if about.get("base_model") else "")))
    return lines


@app.command("pause")
@with_options
def pause(cli: Cli, job: Name) -> None:
    """Pause a job until it is resumed; nothing is lost."""
    _act(cli, "pause", job)


@app.command("resume")
@with_options
def resume(cli: Cli, job: Name) -> None:
    """Resume a paused job."""
    _act(cli, "resume", job)


@app.command("rollback")
@with_options
def rollback(cli: Cli, job: Name) -> None:
    """Resume a paused job from the newest version that is there: the bytes of its last one are lost for good."""
    _act(cli, "rollback", job)


@app.command("cancel")
@with_options
def cancel(cli: Cli, job: Name) -> None:
    """End a job for good; its versions stay."""
    _act(cli, "cancel", job)


@app.command("delete")
@with_options
def delete(cli: Cli, job: Name) -> None:
    """Delete a job that has ended, with its versions and all its results."""
    with cli.client() as client:
        found = client.job(job)
        found.delete()
    cli.show({"deleted": found.id}, f"{found.name} ({found.id}) is deleted")


@app.command("logs")
@with_options
def logs(
    cli: Cli,
    job: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    limit: Annotated[int, typer.Option(help="How many events to show.", min=1, max=1000)] = 100,
) -> None:
    """A job's events, then its steps; with -f the exit code says how it ended, and a paused job is waited for."""
    with cli.client() as client:
        found = client.job(job)
        if follow:
            try:
                code = ENDINGS[Follower(cli, found, ends_paused=False).follow().state]
            except KeyboardInterrupt:
                code = INTERRUPTED
            raise typer.Exit(code)
        events, rows, spec = found.events(limit), list(found.metrics(follow=False)), found.show().spec
    lines = StepLines(console().width if is_terminal() else None)
    if cli.json:
        print_json({"events": events, "metrics": [lines.figures(row, spec) for row in rows]})
        return
    for event in events:
        show(f"{time_of(event.time)}  {event.kind.replace('_', ' ')}: {printable(event.text)}")
    for row in rows:
        for line in lines.of(row, spec):
            show(line)


@app.command("episodes")
@with_options
def episodes(
    cli: Cli,
    job: Name,
    step: Annotated[int | None, typer.Option(help="Only episodes of the groups that this step consumed.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed ones, with their errors.")] = False,
    text: Annotated[str, typer.Option(help="Only those with this exact text, or with it in their error.")] = "",
    limit: Annotated[int, typer.Option(help="How many, newest first.", min=1, max=10_000)] = 20,
    episode: Annotated[str | None, typer.Option("--id", help="One episode whole, with every turn.")] = None,
) -> None:
    """List the episodes of a job with texts and rewards, newest first; ``--json`` has prompts and metrics too."""
    with cli.client() as client:
        found = client.job(job)
        if episode is not None:
            one = found.episode(episode)
            if cli.json:
                print_json(one)
            else:
                show("\n".join(conversation_lines(one)))
            return
        rows = found.episodes(step=step, failed=failed or None, text=text, limit=limit)
    if cli.json:
        print_json(rows)
    elif not rows:
        show("no episode that is kept is like that")
    for row in [] if cli.json else rows:
        show("\n".join(episode_lines(row)))


def episode_lines(row: Mapping[str, Any]) -> list[str]:
    """An episode of a list: its name, reward and length, then its replies or its error."""
    ended = f", ended by {row['finish'].replace('_', ' ')}" if row["finish"] not in (None, "done") else ""
    of = f"group {row['ordinal']}, version {row['version']}"
    lines = [f"{row['episode']}  {of}, {outcome(row)}, {count_of(row['tokens'], 'token')}{ended}"]
    if row["error"]:
        lines.append(f"  error: {printable(row['error'])}")
    for reply, policy in itertools.zip_longest(row["replies"], row.get("speakers") or []):
        first, *others = reply.splitlines() or [""]
        lines.append(f"  {printable(f'{policy}: {first}' if policy else first)}")
        lines += [f"  {printable(line)}" for line in others]
    return lines


def conversation_lines(one: Mapping[str, Any]) -> list[str]:
    """An episode whole: each message, and after a reply what its turn earned."""
    lines = [f"{one['episode']}: {outcome(one)}"]
    if one["error"]:
        lines.append(f"error: {printable(one['error'])}")
    several = len({turn.get("policy") for turn in one["turns"]}) > 1
    turns = {turn["message"]: turn for turn in one["turns"]}
    begins = {0} | {before["message"] + 1 for before in one["turns"]}  # where the messages of a turn begin
    for index, message in enumerate(one["messages"] or []):
        turn = turns.get(index)
        following = next((turn for turn in one["turns"] if turn["message"] >= index), None)
        if index in begins and following is not None and following.get("follows") is not None:
            after = following["follows"]
            lines.append(f"— after turn {after + 1} —" if after >= 0 else "— another conversation —")
        role = message["role"] + (f" ({printable(turn['policy'])})" if several and turn is not None else "")
        lines += [f"{role}:", *(f"  {printable(line)}" for line in message["content"].splitlines() or [""])]
        if turn is not None:
            seconds = f"{turn['generation_seconds']:.2f} s generation, {turn['environment_seconds']:.2f} s environment"
            parts = [("", turn["reward"])] if turn["reward"] or not turn.get("rewards") else []
            parts += (turn.get("rewards") or {}).items()
            earned = ", ".join(reward_text(value, printable(name)) for name, value in parts)
            untrained = "" if turn.get("trained", True) else ", not trained on"
            lines.append(
                f"  → {earned}, {count_of(turn['tokens'], 'token')}, ended by {turn['finish']}, {seconds}{untrained}"
            )
    if one["messages"] is None:
        lines.append("its text is not kept any more")
    return lines


@app.command("export")
@with_options
def export(
    cli: Cli,
    job: Name,
    file: Annotated[Path, path_argument(metavar="FILE", help="The HTML file to write.")],
    limit: Annotated[int, typer.Option("--episodes", help="How many of the newest episodes.", min=0, max=10_000)] = 100,
) -> None:
    """Write a job into one HTML file that needs no service: curves, evaluations, episodes, events, settings."""
    with cli.client() as client:
        found = client.job(job)
        written = report(found, limit).encode()
    with replaced(file) as out:
        out.write(written)
    size = len(written)
    cli.show({"job": found.id, "file": str(file), "bytes": size}, f"{file} has {found.name} ({size:,} bytes)")


@app.command("tensorboard")
@with_options
def tensorboard(
    cli: Cli,
    job: Name,
    folder: Annotated[Path, path_argument(metavar="DIR", help="The folder for tensorboard --logdir.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Write until the job has ended.")] = False,
) -> None:
    """Write a job's metrics and evaluations for TensorBoard, into a file of the job that replaces an earlier one."""
    with cli.client() as client:
        found = client.job(job)
        file = found.write_tensorboard(folder, follow)
    cli.show({"job": found.id, "file": str(file)}, f"{file} has {found.name}")


@uploads.command("list")
@with_options
def list_uploads(cli: Cli) -> None:
    """The datasets, inline rows of jobs too, and adapters of this key's tenant."""
    with cli.client() as client:
        rows = client.uploads()
    table = Rows(columns(("hash", "kind"), ("bytes",), ("stored",)))
    for row in rows:
        table.add(row.hash, row.kind, f"{row.size:,}", time_of(row.created))
    cli.show_rows(rows, lambda: table, "no uploads yet; a job with a dataset or an adapter makes one")


@uploads.command("delete")
@with_options
def delete_upload(cli: Cli, hash: Annotated[str, typer.Argument(metavar="HASH")]) -> None:
    """Delete an upload that no job uses which has not ended."""
    with cli.client() as client:
        client.delete_upload(hash)
    cli.show({"deleted": hash}, f"{hash} is deleted")


def _act(cli: Cli, action: str, job: str) -> None:
    with cli.client() as client:
        view = getattr(client.job(job), action)()
    cli.show(view, _state_line(view.name, view))


def _state_line(name: str, view: Any) -> str:
    return f"{name} is {view.state}" + (f": {view.reason}" if view.reason else "")


def cost_lines(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A job's compute time, and its cost where workers have a price."""
    lines = [("compute", f"{cost['seconds']:,.0f} s")] if cost["seconds"] else []
    if cost["cost"]:
        shares = f"{cost['reserved']:.4g} reserved, {cost['preemptible']:.4g} preemptible"
        lines += [
            ("cost", f"{cost['cost']:.4g} ({shares})"),
            ("tokens per price unit", f"{cost['tokens_per_unit']:,.0f}"),
        ]
    return lines
