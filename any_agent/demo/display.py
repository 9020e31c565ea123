"""The demo's console output: a live frame on a terminal, else lines of plain text. Needs rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import Self

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from any_agent.demo.report import Commands, Report, times
from any_agent.demo.state import DemoState, PartState
from any_agent.launcher.training_progress import format_step

_LEVELS = "▁▂▃▄▅▆▇█"
_MAX_WIDTH = 100
_LABEL = 9
_COLOURS = {"ready": "green", "starting": "yellow", "restarting": "red"}
_STATES = {
    "open": ["open"],
    "finalized": ["finalized", "leased"],
    "trained": ["trained"],
    "rejected": ["rejected"],
    "lost": ["aborted", "expired"],
}
"""Shown counts, and the session states that each sums."""
_KINDS = {"engine": "engines", "rank": "ranks"}


class Display:
    """Shows the state that ``get_state`` returns, until the context ends.

    A ``live`` display draws it several times a second, and calls ``get_state`` in another thread;
    a plain one prints what is new whenever :meth:`update` is called.
    """

    def __init__(
        self, get_state: Callable[[], DemoState], console: Console | None = None, *, live: bool
    ) -> None:
        self._console = console or Console(highlight=False)
        self._get_state = get_state
        self._printed: DemoState | None = None
        self._live: Live | None = None
        if live:
            self._live = Live(
                get_renderable=lambda: frame(self._get_state(), self._console.width),
                console=self._console,
                refresh_per_second=5,
                transient=True,
                # Lines that a library prints would tear the frame.
                redirect_stdout=True,
                redirect_stderr=True,
            )

    def __enter__(self) -> Self:
        if self._live is None:
            self.update()
            return self
        try:
            self._live.start(refresh=True)
        except BaseException:
            # After Ctrl-C during the first frame, only this shows the cursor again.
            self._live.stop()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._live is not None:
            # An error is easier to understand below the last frame.
            self._live.transient = error is None
            self._live.stop()

    def say(self, line: str) -> None:
        """Print one of the launcher's lines; the live frame shows the parts themselves."""
        if self._live is None:
            self._print(Text(line))

    def update(self) -> None:
        """Print what is new in the state; the live frame is drawn again anyway."""
        if self._live is None:
            now = self._get_state()
            for line in news(self._printed, now):
                self.say(line)
            self._printed = now

    def end(self, report: Report, rewards: Sequence[float], commands: Commands) -> None:
        """Print the summary."""
        for line in summary(report, rewards, commands, sparks=self._live is not None):
            self._print(line)

    def _print(self, line: Text) -> None:
        if self._live is not None:
            self._console.print(line, soft_wrap=True)
        else:
            print(line.plain, file=self._console.file, flush=True)


def news(before: DemoState | None, now: DemoState) -> list[str]:
    """Return lines about the changes since an earlier state."""
    out = []
    if before is None:
        out.append(_line("demo", f"seed {now.seed}, files in {now.folder}"))
    if now.url and (before is None or not before.url):
        out.append(_line("dashboard", f"{now.url}/ui"))
    if before is None or before.phase != now.phase:
        out.append(_line("now", now.phase))
    known = {step["step"] for step in before.history} if before else set()
    out += [
        format_step(step, now.steps, earlier)
        for earlier, step in pairwise([{}, *now.history])
        if step["step"] not in known
    ]
    for name in ("before", "after"):
        measures = getattr(now, name)
        if measures is not None and (before is None or getattr(before, name) is None):
            out.append(_line(name, f"first answer right: {measures.accuracy:.1%}"))
    return out


def summary(
    report: Report, rewards: Sequence[float], commands: Commands, *, sparks: bool = False
) -> list[Text]:
    """Return the demo's results, its steps' mean rewards, and the commands to type next.

    ``sparks`` draws the rewards, which needs UTF-8.
    """
    out = [Text(), _row(("on prompts that training never sees", "before", "after"), "dim")]
    out += [*(_row(row, "bold green") for row in report.rows()), Text()]
    if rewards:
        line = Text(f"{rewards[0]:.3f} to {rewards[-1]:.3f} in {len(rewards)} steps")
        sparkle = Text(f"{sparkline(rewards, 60)} " if sparks else "", style="cyan")
        out.append(Text.assemble((_line("reward", ""), "dim"), sparkle, line))
    out += [Text.assemble((_line(label, ""), "dim"), text) for label, text in report.facts()]
    for title, lines in commands:
        out += [Text(), Text(title, style="bold")]
        out += [Text(f"    {line}", style="cyan") for line in lines]
    return out


def _row(cells: tuple[str, str, str], last: str) -> Text:
    return Text.assemble(f"{cells[0]:<38}{cells[1]:>8}", (f"{cells[2]:>8}", last))


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}} {text}"


def frame(state: DemoState, width: int) -> RenderableType:
    """Return the state in a box of at most ``width`` columns."""
    width = min(width, _MAX_WIDTH)
    room = width - _LABEL - 5
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=_LABEL, style="dim", no_wrap=True)
    rows.add_column(width=room, no_wrap=True, overflow="ellipsis")
    for label, parts in part_lines(state.parts):
        rows.add_row(label, parts)
    if state.url:
        rows.add_row("dashboard", f"{state.url}/ui")
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
    """Return a line for each kind of part, with the state of each of them."""
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


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the values as bars between 0 and 1; a narrow line averages neighbours."""
    cells = min(width, len(values))
    bars = ""
    for k in range(cells):
        span = values[k * len(values) // cells : (k + 1) * len(values) // cells]
        mean = sum(span) / len(span)
        bars += _LEVELS[max(0, min(len(_LEVELS) - 1, int(mean * len(_LEVELS))))]
    return bars


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _progress(state: DemoState, room: int) -> RenderableType:
    text = f"{state.step}/{state.steps}"
    bar = ProgressBar(
        total=state.steps,
        completed=state.step,
        width=max(1, room - len(text) - 1),
        complete_style="green",
        finished_style="green",
    )
    line = Table.grid(padding=(0, 1))
    line.add_row(text, bar)
    return line


def _reward(state: DemoState, room: int) -> Text:
    if not state.history:
        return Text("-", style="dim")
    bars = sparkline(state.rewards, room - 6)
    return Text.assemble((f"{state.rewards[-1]:.3f} ", "bold"), (bars, "cyan"))


def _version(state: DemoState) -> Text:
    last = state.history[-1] if state.history else None
    version, staleness = (last["version"], f"{last['staleness_mean']:.2f}") if last else (0, "-")
    return Text.from_markup(
        f"{version}   [dim]staleness[/] {staleness}   "
        f"[dim]tokens/s[/] {state.tokens_per_second:.0f}"
    )


def _sessions(state: DemoState) -> Text:
    line = Text()
    for name, states in _STATES.items():
        count = sum(state.sessions.get(each, 0) for each in states)
        if count or name != "lost":
            line.append(f"{name} ", style="dim")
            line.append(f"{count}   " if state.sessions else "-   ")
    return line


def _held_out(state: DemoState) -> Text:
    line = Text.assemble(("first answer right: ", "dim"))
    for name, known in (("before", state.before), ("after", state.after)):
        if known is not None:
            line.append(f"{name} ", style="dim")
            line.append(f"{known.accuracy:.1%}   ", style="bold")
    if state.asked:
        line.append(f"{state.asked}/{state.prompts} asked")
    return line
