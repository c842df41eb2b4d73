"""The live table of ``rookery top``. This module alone imports textual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Header, Input, Static

from rookery.aio import on_end_signals
from rookery.cli.options import INTERRUPTED
from rookery.cli.output import time_of
from rookery.cli.overview import Overview, ServiceReader
from rookery.errors import RookeryError
from rookery.telemetry.rows import printable
from rookery.telemetry.table import WORKER_STYLES, job_cells, policy_figures, rounded, sparkline, waits

REFRESH_SECONDS = 2.0
ORDERS = ("created", "name", "state", "step", "reward")
"""Orders of the runs, by the service: it sorts all of them, not only those that are shown."""
DESCENDING = {"created": True, "name": False, "state": False, "step": True, "reward": True}
STEPS_SHOWN = 15
EVENTS_SHOWN = 12

RUN_COLUMNS = ("run", "tenant", "state", "step", "reward", "last steps", "tok/s", "stale", "waits for", "cost")
WORKER_COLUMNS = ("worker", "kind", "state", "model", "roles", "requests", "tok/s", "memory", "price/h", "note")
GIGABYTE = 1 << 30


def run_cells(run: Any) -> list[Text | str]:
    """A run as a row of the table."""
    name, state, step, reward = job_cells(run)
    running = run["state"] == "running"
    return [
        name, Text(printable(run["tenant"])), state, step, reward, Text(sparkline(run["rewards"]), "green"),
        rounded(run["tokens_per_second"], "{:.0f}") if running else "–", rounded(run["staleness"], "{:.1f}"),
        Text(printable(waits(run)), "dim"), rounded(run["cost"]["cost"], "{:.3g}"),
    ]  # fmt: skip


def worker_cells(worker: Any) -> list[Text | str]:
    """A worker as a row of the table."""
    gauges = (worker["beat"] or {}).get("gauges", {})
    used, budget = gauges.get("worker_memory_bytes") or 0, gauges.get("worker_memory_budget_bytes") or 0
    state = str(worker["state"])
    return [
        Text(printable(worker["name"])), worker["kind"], Text(state, WORKER_STYLES.get(state, "")),
        Text(printable(worker["model"])), " ".join(worker["roles"]), str(worker["requests"]),
        rounded(worker["tokens_per_second"], "{:.0f}"),
        f"{used / GIGABYTE:.1f} of {budget / GIGABYTE:.1f} GB" if budget else "–", rounded(worker["price"], "{:g}"),
        Text(printable(str(worker["note"])), "dim"),
    ]  # fmt: skip


class RunScreen(Screen[None]):
    """One run: its figures, what is wrong with it, its newest steps and events."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,backspace", "back", "Back")]

    def __init__(self, source: ServiceReader, run: str) -> None:
        super().__init__()
        self._source = source
        self._run = run

    def compose(self) -> ComposeResult:
        yield Header()
        with VerticalScroll():
            yield Static("reads the run …", id="run", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.refresh_run()
        self.set_interval(REFRESH_SECONDS, self.refresh_run)

    def action_back(self) -> None:
        self.app.pop_screen()

    @work(thread=True, exclusive=True)
    def refresh_run(self) -> None:
        try:
            shown = self._read()
        except RookeryError as error:
            shown = Text(printable(str(error)), "bold red")
        self.app.call_from_thread(self._show, shown)

    def _show(self, shown: Text) -> None:
        if self.is_attached:
            self.query_one("#run", Static).update(shown)

    def _read(self) -> Text:
        job = self._source.client.job(self._run)
        view, health = job.show(), job.health()
        name, state, step, reward = job_cells(view)
        lines = Text.assemble(("", ""), name, "  ", state, f"  step {step}  reward {reward}  ",
                              (sparkline(view.rewards, 48), "green"), "\n")  # fmt: skip
        facts = [
            ("id", view.id), ("tenant", view.tenant), ("base model", view.base_model), ("waits for", waits(view)),
            ("tokens sampled", f"{view.tokens:,}"), ("tokens/s", rounded(view.tokens_per_second, "{:.0f}")),
            ("submitted", time_of(view.created)), ("cost", rounded(view.cost.cost, "{:.4g}")),
        ]  # fmt: skip
        for key, value in facts:
            lines.append(f"{key:<15} ", "dim").append(f"{printable(str(value)) or '–'}\n")
        for policy in view.policies if len(view.spec.policies) > 1 else []:
            figures = "".join(f", {name} {number}" for name, number in policy_figures(policy))
            lines.append(f"{printable(policy.name):<15} ", "dim").append(f"version {policy.version}{figures}\n")
        for alarm in health.alarms:
            whose = f" ({printable(alarm.policy)})" if alarm.policy else ""
            lines.append(f"\n{printable(alarm.name)}{whose}: ", "bold red").append(
                printable(f"{alarm.problem}; {alarm.remedy}")
            )
        for advice in health.advice:
            lines.append("\nadvice: ", "cyan").append(printable(advice))
        rows = list(job.metrics(after=max(-1, view.step - STEPS_SHOWN), follow=False))[-STEPS_SHOWN:]
        lines.append_text(step_table(rows))
        lines.append("\nevents\n", "dim")
        for event in reversed(job.events(EVENTS_SHOWN)):
            lines.append(f"{time_of(event.time)}  ", "dim").append(f"{event.kind}: {printable(event.text)}\n")
        return lines


def step_table(rows: Sequence[Mapping[str, Any]]) -> Text:
    """The metrics of steps, the newest first; empty without any. A run on rows has a loss in the place of a reward."""
    lines = Text()
    if not rows:
        return lines
    score = "reward" if any(row.get("reward") is not None for row in rows) else "loss"
    name = max([0, *(len(row["policy"]) for row in rows if row.get("policy"))])  # where there are several
    wide = max(len("policy"), name)
    whose = f" {'policy':>{wide}}" if name else ""
    lines.append(f"\n\n  step{whose} {score:>9}  episodes  length  stale  generation  training\n", "dim")
    for row in reversed(rows):
        mine = f" {printable(row.get('policy') or ''):>{wide}}" if name else ""
        lines.append(
            f"{row['step']:6d}{mine} {rounded(row.get(score), '{:9.3f}'):>9}"
            f" {rounded(row.get('episodes'), '{:.0f}'):>9}"
            f" {rounded(row.get('length_mean'), '{:.1f}'):>7} {rounded(row.get('staleness_mean'), '{:.1f}'):>6}"
            f" {rounded(row.get('seconds/generation'), '{:.1f} s'):>11}"
            f" {rounded(row.get('seconds/train'), '{:.1f} s'):>9}\n"
        )
    return lines


class TopScreen(App[None]):
    """The table of the runs above that of the workers. A signal that asks the process to end closes it, with
    :data:`INTERRUPTED` as its return code: an exception in the middle of a handler would be printed by textual."""

    TITLE = "rookery top"
    CSS = """
    #line { height: 1; padding: 0 1; }
    #problem { height: auto; padding: 0 1; color: $error; display: none; }
    #runs { height: 2fr; }
    #workers { height: 1fr; }
    #alarms { height: auto; max-height: 6; padding: 0 1; }
    #search { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("s", "sort", "Sort"), ("S", "reverse", "Reverse"), ("slash", "search", "Search"),
        ("f", "filter", "Running only"), ("r", "reload", "Reload"), ("tab", "focus_next", "Runs/fleet"),
        ("q", "quit", "Quit"), ("question_mark", "show_help_panel", "Keys"),
    ]  # fmt: skip

    def __init__(self, source: ServiceReader) -> None:
        super().__init__()
        self._source = source
        self._order, self._descending, self._text, self._running_only = "created", True, "", False
        self._alarmed = ""
        """The run whose alarms are shown."""

    def compose(self) -> ComposeResult:
        yield Header()
        yield Static("reads the service …", id="line", markup=False)
        yield Static("", id="problem", markup=False)
        yield Input(placeholder="Part of a run's name; Enter searches, empty shows all", id="search")
        yield DataTable(id="runs", cursor_type="row", zebra_stripes=True)
        yield Static("", id="alarms", markup=False)
        yield DataTable(id="workers", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        on_end_signals(lambda: self.exit(return_code=INTERRUPTED))
        self.sub_title = self._source.client.url
        for id, columns in (("#runs", RUN_COLUMNS), ("#workers", WORKER_COLUMNS)):
            self.query_one(id, DataTable).add_columns(*columns)
        self.query_one("#workers").display = False
        self.query_one("#runs").focus()
        self.read_service()
        self.set_interval(REFRESH_SECONDS, self.read_service)

    # --- keys ---------------------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._descending = DESCENDING[self._order]
        self.read_service()

    def action_reverse(self) -> None:
        self._descending = not self._descending
        self.read_service()

    def action_filter(self) -> None:
        self._running_only = not self._running_only
        self.read_service()

    def action_reload(self) -> None:
        self.read_service()

    def action_search(self) -> None:
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._text, event.input.display = event.value.strip(), False
        self.query_one("#runs").focus()
        self.read_service()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        if event.data_table.id == "runs" and event.row_key.value:
            self.push_screen(RunScreen(self._source, event.row_key.value))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if event.data_table.id == "runs" and event.row_key.value != self._alarmed:
            self._alarmed = event.row_key.value or ""
            self.read_alarms(self._alarmed)

    # --- data ---------------------------------------------------------------------------------------------------------

    @work(thread=True, exclusive=True, group="service")
    def read_service(self) -> None:
        try:
            seen = self._source.read(self._order, self._descending, self._text, self._running_only)
        except RookeryError as error:
            self.call_from_thread(self._problem, str(error))
        else:
            self.call_from_thread(self._show, seen)

    @work(thread=True, exclusive=True, group="alarms")
    def read_alarms(self, run: str) -> None:
        try:
            lines = self._source.alarms(run) if run else []
        except RookeryError as error:
            lines = [str(error)]
        self.call_from_thread(self._show_alarms, run, lines)

    def _problem(self, text: str) -> None:
        problem = self.query_one("#problem", Static)
        problem.update(f"{printable(text)}; what follows is older")
        problem.display = True

    def _show(self, seen: Overview) -> None:
        self.query_one("#problem").display = False
        arrow = "↓" if self._descending else "↑"
        chosen = [f"by {self._order} {arrow}", *([f"with {self._text!r}"] if self._text else [])]
        chosen += ["running only"] if self._running_only else []
        more = f", {len(seen.runs)} of {seen.total} shown" if seen.total > len(seen.runs) else ""
        self.query_one("#line", Static).update(f"{seen.line} · {', '.join(chosen)}{more}")
        fill(self.query_one("#runs", DataTable), [(run["id"], run_cells(run)) for run in seen.runs])
        workers = self.query_one("#workers", DataTable)
        workers.display = bool(seen.workers)
        fill(workers, [(worker["name"], worker_cells(worker)) for worker in seen.workers or []])
        self.read_alarms(self._alarmed)

    def _show_alarms(self, run: str, lines: Sequence[str]) -> None:
        if run == self._alarmed:
            shown = Text("\n").join(Text(f"! {printable(line)}", "bold red") for line in lines)
            self.query_one("#alarms", Static).update(shown)


def fill(table: DataTable[Any], rows: Sequence[tuple[str, Sequence[Text | str]]]) -> None:
    """The rows in their order; the cursor stays on its row, and the table where it is scrolled to."""
    keys = list(table.rows)
    if [key.value for key in keys] == [key for key, _ in rows]:
        columns = list(table.columns)
        for key, cells in rows:
            for column, cell in zip(columns, cells, strict=True):
                if table.get_cell(key, column) != cell:
                    table.update_cell(key, column, cell, update_width=True)
        return
    at = keys[table.cursor_row].value if keys and table.cursor_row < len(keys) else None
    scroll = table.scroll_y
    table.clear()
    for key, cells in rows:
        table.add_row(*cells, key=key)
    names = [key for key, _ in rows]
    if at in names:
        table.move_cursor(row=names.index(at), scroll=False)
        table.scroll_to(y=scroll, animate=False)
