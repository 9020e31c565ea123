"""The demo on a terminal: a frame that is drawn again as things change. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from types import TracebackType
from typing import Self

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from any_agent.demo.report import Report, times
from any_agent.demo.state import DemoState, PartState

_LEVELS = "▁▂▃▄▅▆▇█"
_WIDEST = 100
_LABEL = 9
_COLOURS = {"ready": "green", "starting": "yellow", "restarting": "red"}
_STATES = {
    "open": ["open"],
    "finalized": ["finalized", "leased"],
    "trained": ["trained"],
    "rejected": ["rejected"],
    "lost": ["aborted", "expired"],
}
"""What is shown, and the states that it sums."""
_KINDS = {"engine": "engines", "rank": "ranks"}


class LiveDisplay:
    """Shows the state that ``look`` gives, several times a second, until the context ends.

    ``look`` is called in another thread.
    """

    def __init__(self, look: Callable[[], DemoState], console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._look = look
        self._live = Live(
            get_renderable=self._frame,
            console=self._console,
            refresh_per_second=5,
            transient=True,
            # What a library prints in passing would tear the frame.
            redirect_stdout=True,
            redirect_stderr=True,
        )

    def __enter__(self) -> Self:
        try:
            self._live.start(refresh=True)
        except BaseException:
            # Ctrl-C during the first frame: nobody else would show the cursor again.
            self._live.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What went wrong is easier to understand below the last frame.
        self._live.transient = error is None
        self._live.stop()

    def say(self, line: str) -> None:
        """The launcher's lines: the frame shows the parts themselves."""

    def changed(self) -> None:
        """The frame is drawn again anyway."""

    def end(self, report: Report) -> None:
        self._console.print(summary(report), soft_wrap=True)

    def _frame(self) -> RenderableType:
        return frame(self._look(), self._console.width)


def frame(state: DemoState, width: int) -> RenderableType:
    """The state in a box of at most ``width`` columns."""
    width = min(width, _WIDEST)
    room = width - _LABEL - 5
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=_LABEL, style="dim", no_wrap=True)
    rows.add_column(width=room, no_wrap=True, overflow="ellipsis")
    for label, parts in part_lines(state.parts):
        rows.add_row(label, parts)
    if state.url:
        rows.add_row("address", state.url)
    rows.add_row("", "")
    rows.add_row("step", _progress(state, room))
    rows.add_row("reward", _reward(state, room))
    rows.add_row("version", _version(state))
    rows.add_row("sessions", _sessions(state))
    rows.add_row("held out", _held_out(state))
    title = f"any-agent demo · seed {state.seed} · {clock(state.elapsed)}"
    box = Panel(
        Group(Text(state.phase, style="bold", no_wrap=True, overflow="ellipsis"), rows),
        title=title,
        title_align="left",
        subtitle=f"files in {state.folder}",
        subtitle_align="left",
        box=ROUNDED,
        border_style="blue",
        width=width,
    )
    # The cursor rests on a line of its own, where a `^C` tears nothing.
    return Group(box, Text())


def part_lines(parts: Iterable[PartState]) -> list[tuple[str, Text]]:
    """A line for each kind of part, with the state of each of them."""
    lines = []
    for kind, members in groupby(parts, key=lambda part: part.name.partition("-")[0]):
        line = Text()
        for part in members:
            number = part.name.partition("-")[2]
            line.append(f"{number} " if number else "")
            line.append(part.state, style=_COLOURS.get(part.state, "dim"))
            if part.restarts:
                line.append(f" (restarted {times(part.restarts)})", style="yellow")
            line.append("   ")
        line.rstrip()
        lines.append((_KINDS.get(kind, kind), line))
    return lines


def sparkline(values: Sequence[float], width: int, *, low: float = 0.0, high: float = 1.0) -> str:
    """The values as bars between ``low`` and ``high``; neighbours are averaged if it is narrow."""
    cells = min(width, len(values))
    bars = ""
    for k in range(cells):
        span = values[k * len(values) // cells : (k + 1) * len(values) // cells]
        share = (sum(span) / len(span) - low) / (high - low)
        bars += _LEVELS[max(0, min(len(_LEVELS) - 1, int(share * len(_LEVELS))))]
    return bars


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _progress(state: DemoState, room: int) -> RenderableType:
    text = f"{state.step}/{state.steps}"
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    line.add_column()
    bar = ProgressBar(
        total=state.steps,
        completed=state.step,
        width=max(1, room - len(text) - 1),
        complete_style="green",
        finished_style="green",
    )
    line.add_row(text, bar)
    return line


def _reward(state: DemoState, room: int) -> Text:
    if not state.history:
        return Text("-", style="dim")
    line = Text()
    line.append(f"{state.rewards[-1]:.3f} ", style="bold")
    line.append(sparkline(state.rewards, room - 6), style="cyan")
    return line


def _version(state: DemoState) -> Text:
    last = state.history[-1] if state.history else None
    line = Text(str(last.version if last else 0))
    line.append("   staleness ", style="dim")
    line.append(f"{last.staleness:.2f}" if last else "-")
    line.append("   tokens/s ", style="dim")
    line.append(f"{state.tokens_per_second:.0f}")
    return line


def _sessions(state: DemoState) -> Text:
    line = Text()
    for name, states in _STATES.items():
        count = sum(state.sessions.get(each, 0) for each in states)
        if count or name != "lost":
            line.append(f"{name} ", style="dim")
            line.append(f"{count}   " if state.sessions else "-   ")
    return line


def _held_out(state: DemoState) -> Text:
    line = Text()
    line.append("first answer right: ", style="dim")
    for name, known in (("before", state.before), ("after", state.after)):
        if known is not None:
            line.append(f"{name} ", style="dim")
            line.append(f"{known.accuracy:.1%}   ", style="bold")
    if state.asked:
        line.append(f"{state.asked}/{state.prompts} asked")
    return line


def summary(report: Report) -> RenderableType:
    """What the demo came to, and what to type next."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(report.title)
    table.add_column("before", justify="right")
    table.add_column("after", justify="right", style="bold green")
    for row in report.rows():
        table.add_row(*row)
    facts = Text()
    rewards = report.rewards
    if rewards:
        facts.append(f"{'reward':<{_LABEL}} ", style="dim")
        facts.append(sparkline(rewards, 60), style="cyan")
        facts.append(f" {rewards[0]:.3f} to {rewards[-1]:.3f} in {len(rewards)} steps\n")
    for label, text in report.facts():
        facts.append(f"{label:<{_LABEL}} ", style="dim")
        facts.append(f"{text}\n")
    for title, commands in report.next:
        facts.append(f"\n{title}\n", style="bold")
        for command in commands:
            facts.append(f"    {command}\n", style="cyan")
    return Group(table, Text(), facts)
