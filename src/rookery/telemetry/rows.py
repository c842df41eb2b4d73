"""A table for the terminal whose names and ids are always whole: other columns fold, or are shown under their row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from rookery.errors import single_line

NARROWEST_NOTE = 24
"""Characters below which a folding column is never next to the others: narrower ones break every word."""

GAP = "  "
"""Between two columns."""

INDENT = "    "
"""Before what is shown under a row."""


def printable(text: str) -> str:
    """``text`` for a terminal: :func:`~rookery.errors.single_line` of its words."""
    return single_line(" ".join(text.split()))


@dataclass(frozen=True)
class Column:
    """``note`` columns fold; the others, which identify a row or are short, are always whole."""

    name: str
    right: bool = False
    note: bool = False


@dataclass
class Rows:
    """A table. Where the whole columns do not fit next to each other, each row becomes lines of ``name value`` pairs,
    under the name of the first column; where only the notes do not fit, they are shown under their row. A note folds
    in the line of its row where that takes no more lines."""

    columns: Sequence[Column]
    rows: list[list[Text]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """A row: a text or a value for each column; None and the empty text show nothing."""
        self.rows.append([_cell(value) for value in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths = [
            max([len(column.name), *(row[i].cell_len for row in self.rows)]) for i, column in enumerate(self.columns)
        ]
        shown = [i for i, column in enumerate(self.columns) if not column.note or any(row[i] for row in self.rows)]
        whole = [i for i in shown if not self.columns[i].note]
        notes = [i for i in shown if self.columns[i].note]
        width = options.max_width
        taken = sum(widths[i] + len(GAP) for i in whole) - len(GAP)
        if whole and taken > width:
            yield from self._records(console, width)
            return
        room = width - taken - sum(len(GAP) for _ in notes)
        wanted = sum(widths[i] for i in notes)
        if wanted <= room:
            inline, below = shown, list[int]()
        elif len(notes) == 1 and room >= NARROWEST_NOTE and self._folds_short(console, notes[0], room, width):
            widths[notes[0]] = room
            inline, below = shown, []
        else:
            inline, below = whole, notes
        yield self._line([Text(self.columns[i].name, "bold") for i in inline], inline, widths)
        for row in self.rows:
            yield from self._folded(console, [row[i] for i in inline], inline, widths)
            yield from self._below(console, row, below, width)

    def _folds_short(self, console: Console, note: int, room: int, width: int) -> bool:
        """Whether a note in a column of ``room`` characters takes no more lines than under its row."""
        inline = below = 0
        for row in self.rows:
            inline += max(1, len(row[note].wrap(console, room, overflow="fold")))
            below += 1 + len(self._under(console, row, note, width))
        return inline <= below

    def _records(self, console: Console, width: int) -> Iterator[RenderableType]:
        """A row as a line of its first column, and under it ``name value`` for the others that are not empty: as many
        on a line as fit whole, and notes on separate lines."""
        yield Text(self.columns[0].name, "bold")
        for row in self.rows:
            yield row[0]
            line = Text()
            for column, cell in zip(self.columns[1:], row[1:], strict=True):
                if not cell or column.note:
                    continue
                pair = Text.assemble((f"{column.name} ", "dim"), cell)
                if line and len(INDENT) + line.cell_len + len(GAP) + pair.cell_len > width:
                    yield Text.assemble(INDENT, line)
                    line = Text()
                line = Text.assemble(line, GAP, pair) if line else pair
            if line:
                yield Text.assemble(INDENT, line)
            notes = [i for i, column in enumerate(self.columns) if column.note]
            yield from self._below(console, row, notes, width)

    def _below(self, console: Console, row: Sequence[Text], notes: Sequence[int], width: int) -> Iterator[Text]:
        """The notes of a row under it."""
        for i in notes:
            for part in self._under(console, row, i, width):
                yield Text.assemble(INDENT, part)

    def _under(self, console: Console, row: Sequence[Text], note: int, width: int) -> Sequence[Text]:
        """The lines of a note under its row, without their indent."""
        if not row[note]:
            return []
        text = Text.assemble((f"{self.columns[note].name}: ", "dim"), row[note])
        return list(text.wrap(console, max(width - len(INDENT), 1), overflow="fold"))

    def _folded(
        self, console: Console, cells: Sequence[Text], indices: Sequence[int], widths: Sequence[int]
    ) -> Iterator[Text]:
        """A row, on several lines where a note is longer than its column."""
        parts = [
            list(cell.wrap(console, widths[i], overflow="fold")) if self.columns[i].note else [cell]
            for cell, i in zip(cells, indices, strict=True)
        ]
        for number in range(max(map(len, parts), default=0)):
            yield self._line([p[number] if number < len(p) else Text() for p in parts], indices, widths)

    def _line(self, cells: Sequence[Text], indices: Sequence[int], widths: Sequence[int]) -> Text:
        line = Text()
        for cell, i in zip(cells, indices, strict=True):
            space = " " * (widths[i] - cell.cell_len)
            line.append_text(Text.assemble(GAP if line.plain else "", *((space, cell) if self.columns[i].right else
                                           (cell, space))))  # fmt: skip
        line.rstrip()
        return line


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return value
    return Text("" if value is None else printable(f"{value:.4g}" if isinstance(value, float) else str(value)))


def columns(left: Iterable[str] = (), right: Iterable[str] = (), notes: Iterable[str] = ()) -> list[Column]:
    """Columns aligned to the left, to the right, and such that fold."""
    return [
        *(Column(name) for name in left),
        *(Column(name, right=True) for name in right),
        *(Column(name, note=True) for name in notes),
    ]
