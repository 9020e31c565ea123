"""The program that `any-agent export` starts: ``python -m proxy_ext.export``."""

from __future__ import annotations

import argparse
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryFile
from typing import Any, TypeVar

from any_agent.cli.export import add_export_arguments
from any_agent.errors import AnyAgentError, ConfigError, NotFound, StartupError, Unprocessable
from any_agent.runtime.command_line import CommandParser, parse
from any_agent.runtime.file_owner import no_access
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.export.choice import Groups, is_candidate, score_of
from proxy_ext.export.formats import FORMATS, PairLine
from proxy_ext.export.otlp import TraceLines
from proxy_ext.export.output import ExportOutput, output
from proxy_ext.export.preferences import Conversation, WaitingConversations, conversation_of
from proxy_ext.export.reader import RunSessions, SessionRecord, credited, row_line, rows
from proxy_ext.export.tables import dataset_folder, parquet_table
from proxy_ext.journal.reader import ExportFilter

_READER_LEFT = 141  # exit code that a shell reports for a program that SIGPIPE ended
_OPTIONS = {"best": ("best", "pairs"), "min_reward": ("best",), "margin": ("pairs",)}
"""Options that choose sessions, and what the formats take to which they belong."""
Row = dict[str, Any]
Report = Callable[[str], None]
A = TypeVar("A")
T = TypeVar("T")


class Exporter:
    """One export of a run's sessions."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._format = FORMATS[arguments.format]
        self._style = _style_of(arguments)
        self._lines = self._format.lines and self._format.lines()
        # Whoever names the folder and the discount needs no readable settings.
        own = arguments.discount is None
        self._run = RunSessions.of(arguments, settings=own or self._format.spans)
        discount = self._run.settings.train.discount if own else arguments.discount
        self._discount = float(discount)
        self._traces = TraceLines(self._run.settings, content=arguments.content)
        self.sessions = self.archived = self.lines = self.problems = 0
        self.left_out: Counter[str] = Counter()

    def run(self) -> None:
        """Write what the arguments ask for, every session that can be read."""
        name, style = self._arguments.out, self._style
        if self._arguments.format == "hf":
            with dataset_folder(name, style or "") as table:
                self._write_rows(table.add)
            return
        with output(name) as out:
            if self._arguments.format == "parquet":
                with parquet_table(out, style or "") as table:
                    self._write_rows(table.add)
            elif self._format.takes == "best":
                self._write_best(out)
            elif self._format.pair is not None:
                self._write_pairs(out, self._format.pair)
            elif self._format.spans:
                self._write_spans(out)
            elif style is not None or self._lines is not None:
                self._write_rows(lambda row: out.write(row_line(row)))
            else:
                for found in self._run.records(self.report):
                    out.write(found.line)
                    self._count(found)

    def report(self, problem: str) -> None:
        """Count and print a problem."""
        self.problems += 1
        print(f"warning: {problem}", file=sys.stderr)

    def summary(self) -> str:
        """Return a line about what was written."""
        text = f"{self.sessions} sessions ({self.archived} of them from archives)"
        if self._format.pair is not None:
            text += f", {self.lines} pairs"
        elif self._format.spans:
            text += f", {self._traces.spans} spans"
        elif self._style is not None or self._lines is not None:
            text += f", {self.lines} rows"
        for why, number in self.left_out.items():
            text += f"; {number} left out: {why}"
        if self.problems:
            text += f"; {self.problems} problems, see above"
        return text

    # -- what is written

    def _write_rows(self, add: Callable[[Row], object]) -> None:
        for found, record in self._read():
            made = self._try(found, self._rows, record)
            if made is None:
                continue
            if self._lines is not None and not made:
                self.left_out["without a call of the model, or without a reward"] += 1
                continue
            for row in made:
                add(row)
            self._count(found, len(made))

    def _write_best(self, out: ExportOutput) -> None:
        """Write the rows of the best sessions of each group."""
        best = self._groups(self._trained_rows).best(self._arguments.best or 1)
        for found, record in self._read(again=True):
            if found.session_id in best:
                made = self._try(found, self._trained_rows, record) or []
                for row in made:
                    out.write(row_line(row))
                self._count(found, len(made))

    def _write_pairs(self, out: ExportOutput, line: PairLine) -> None:
        """Write pairs of a better and a worse session of each group."""
        groups = self._groups(self._conversation)
        pairs = [*groups.pairs(self._arguments.best or 1, self._arguments.margin or 0.0)]
        with TemporaryFile() as file:
            waiting = WaitingConversations(file, pairs)
            for found, record in self._read(again=True):
                if found.session_id not in waiting:
                    continue
                conversation = self._try(found, self._conversation, record)
                if conversation is None:
                    continue
                self._count(found)
                for pair in waiting.add(found.session_id, conversation):
                    try:
                        out.write(row_line(line(*pair, record.session)))
                        self.lines += 1
                    except Unprocessable as error:
                        self.left_out[error.message] += 1

    def _write_spans(self, out: ExportOutput) -> None:
        """Write each session as a trace, line by line as they are made."""
        for found, record in self._read():
            lines = self._traces.of(record)
            line = self._try(found, next, lines)
            if line is not None:
                out.write(line)
                for line in lines:
                    out.write(line)
                self._count(found)

    def _groups(self, usable: Callable[[ArchiveRecord], object]) -> Groups:
        """Read all sessions once; return the scores of those that may be chosen and are usable."""
        groups, least = Groups(), self._arguments.min_reward
        for found, record in self._read():
            if not is_candidate(record.session, self._arguments.state):
                continue
            score = score_of(credited(record, self._discount))
            if score is None or (least is not None and score < least):
                continue
            if self._try(found, usable, record):
                groups.add(record.session, score)
        return groups

    def _rows(self, record: ArchiveRecord) -> list[Row]:
        if self._lines is not None:
            return list(self._lines(record.session, credited(record, self._discount)))
        assert self._style is not None
        return list(rows(record, self._style, self._discount))

    def _trained_rows(self, record: ArchiveRecord) -> list[Row]:
        """Return the rows of a session that have tokens to train on."""
        made = self._rows(record)
        if self._lines is not None or self._style == "messages":
            return made
        return [row for row in made if row["loss_mask"].any()]

    def _conversation(self, record: ArchiveRecord) -> Conversation:
        return conversation_of(credited(record, self._discount))

    # -- what is read

    def _read(self, *, again: bool = False) -> Iterator[tuple[SessionRecord, ArchiveRecord]]:
        """Iterate over the sessions; ``again``: in whatever state, problems are known already."""
        report: Report = _nowhere if again else self.report
        yield from self._run.read(report, ExportFilter() if again else None)

    def _try(self, found: SessionRecord, make: Callable[[A], T], value: A) -> T | None:
        """Return what ``make`` makes of a session; None, with a warning, if it cannot."""
        try:
            return make(value)
        except (ValueError, KeyError, AnyAgentError) as error:
            self.report(f"session {found.session_id} is left out: {error}")
            return None

    def _count(self, found: SessionRecord, lines: int = 0) -> None:
        self.sessions += 1
        self.archived += found.archived
        self.lines += lines


def _nowhere(_: str) -> None:
    """Ignore a problem that was reported before."""


def _style_of(arguments: argparse.Namespace) -> str | None:
    """Return the style of the rows; None for whole sessions and for pairs.

    Raises ConfigError for options that do not belong together.
    """
    name, chosen = arguments.format, FORMATS[arguments.format]
    for each, takes in _OPTIONS.items():
        if getattr(arguments, each) is not None and chosen.takes not in takes:
            fitting = [name for name, one in FORMATS.items() if one.takes in takes]
            option = each.replace("_", "-")
            raise ConfigError(f"--{option} is for --format {', '.join(fitting)}")
    if arguments.content and not chosen.spans:
        raise ConfigError("--content is for --format otel")
    if (chosen.lines or chosen.pair or chosen.spans) and arguments.style is not None:
        raise ConfigError(f"--format {name} has one form: leave --style out")
    if name in ("parquet", "hf") and arguments.out == "-":
        example = "sessions.parquet" if name == "parquet" else "a new folder"
        raise ConfigError(f"--format {name} is no text: name {example} with --out")
    return arguments.style or chosen.style


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="any-agent export")
    add_export_arguments(parser)
    arguments = parse(parser, argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The ranges of numbers of many files may overlap, and all of these are open at once.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        export = Exporter(arguments)
        export.run()
    except BrokenPipeError:
        return _READER_LEFT
    except (ConfigError, NotFound, StartupError) as error:
        print(f"error: {error.message}", file=sys.stderr)
        return getattr(error, "exit_code", ConfigError.exit_code)
    except OSError as error:
        why = str(error)
        if isinstance(error, PermissionError) and error.filename is not None:
            why = no_access(error).message
        print(f"error: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(export.summary(), file=sys.stderr)
    return 1 if export.problems else 0


if __name__ == "__main__":
    sys.exit(main())
