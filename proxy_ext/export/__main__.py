"""The program that `any-agent export` starts: ``python -m proxy_ext.export``."""

from __future__ import annotations

import argparse
import heapq
import re
import resource
import sys
import time
from collections.abc import Iterator

from any_agent.auth.access import run_dir_of
from any_agent.cli.export import add_export_arguments
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError, StartupError, Unprocessable
from any_agent.rundir.layout import JOURNAL_SUFFIX
from any_agent.runtime.command_line import parse
from proxy_ext.archive.records import read_record
from proxy_ext.export.output import ExportOutput, output
from proxy_ext.export.reader import SessionRecord, read_rank, rows
from proxy_ext.journal.reader import ExportFilter

_READER_LEFT = 141  # exit code that a shell reports for a program that SIGPIPE ended
_PROGRESS_INTERVAL = 5.0
_RANK = re.compile(rf"rank-(\d+)({re.escape(JOURNAL_SUFFIX)}|-.*\.jsonl\.gz)")


class Exporter:
    """One export of a run's sessions."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = _config(arguments)
        self._dir = run_dir_of(config)
        saved = self._dir.path / "config.yaml"
        # Read only if needed: whoever names the folder and the discount needs no readable settings.
        needed = self._dir.journals is None or arguments.discount is None
        last = load_config(saved, environ={}) if needed and saved.is_file() else config
        if self._dir.journals is None:
            # The journals lie where the run's last start kept them.
            self._dir = run_dir_of(config.model_copy(update={"server": last.server}))
        self._style: str | None = arguments.style
        self._discount = float(
            last.train.discount if arguments.discount is None else arguments.discount
        )
        self._wanted = ExportFilter(arguments.state or (), arguments.task, arguments.since)
        self._ranks = self._chosen_ranks(arguments.rank)
        self._progress_shown = time.monotonic()
        self.sessions = self.archived = self.lines = self.problems = 0

    def run(self, out: ExportOutput) -> None:
        """Write every session that can be read."""
        for found in self._records():
            try:
                lines = self._lines(found)
            except (ValueError, KeyError, Unprocessable) as error:
                self.report(f"session {found.session_id} is left out: {error}")
                continue
            for line in lines:
                out.write(line)
            self.sessions += 1
            self.archived += found.archived
            self.lines += len(lines)
            self._show_progress()

    def report(self, problem: str) -> None:
        """Count and print a problem."""
        self.problems += 1
        print(f"warning: {problem}", file=sys.stderr)

    def _records(self) -> Iterator[SessionRecord]:
        each = [
            read_rank(self._dir.journal(rank), self._dir.archive, rank, self._wanted, self.report)
            for rank in self._ranks
        ]
        return heapq.merge(*each, key=lambda found: found.created_at)

    def _lines(self, found: SessionRecord) -> list[bytes]:
        if self._style is None:
            return [found.line]
        return list(rows(read_record(found.line), self._style, self._discount))

    def _chosen_ranks(self, wanted: list[int] | None) -> list[int]:
        folders = (self._dir.journal(0).parent, self._dir.archive)
        names = [p.name for f in folders if f.is_dir() for p in f.iterdir()]
        ranks = sorted({int(m[1]) for name in names if (m := _RANK.fullmatch(name))})
        if not ranks:
            raise ConfigError(f"there are no sessions in {self._dir.path}; is root the right one?")
        if missing := set(wanted or ()) - set(ranks):
            raise ConfigError(
                f"there is no rank {min(missing)} in {self._dir.path}; choose among {ranks}"
            )
        return sorted(set(wanted)) if wanted else ranks

    def _show_progress(self) -> None:
        if time.monotonic() - self._progress_shown > _PROGRESS_INTERVAL:
            self._progress_shown = time.monotonic()
            print(f"{self.sessions} sessions exported so far", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(prog="any-agent export")
    add_export_arguments(parser)
    arguments = parse(parser, None)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The ranges of numbers of many files may overlap, and all of these are open at once.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        export = Exporter(arguments)
        with output(arguments.out) as out:
            export.run(out)
    except BrokenPipeError:
        return _READER_LEFT
    except (ConfigError, StartupError) as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    summary = f"{export.sessions} sessions ({export.archived} of them from archives)"
    if arguments.style is not None:
        summary += f", {export.lines} rows"
    if export.problems:
        summary += f"; {export.problems} problems, see above"
    print(summary, file=sys.stderr)
    return 1 if export.problems else 0


def _config(arguments: argparse.Namespace) -> Config:
    overrides = [
        f"{name}={value}"
        for name in ("experiment", "trial")
        if (value := getattr(arguments, name)) is not None
    ]
    return load_config(arguments.config, [*overrides, *arguments.overrides])


if __name__ == "__main__":
    sys.exit(main())
