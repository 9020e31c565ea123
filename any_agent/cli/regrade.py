"""``any-agent regrade``: its arguments.

`proxy_ext.export.regrade`, which reads the journals, does the work. As a part of the proxy it is
another program, which replaces this one.
"""

from __future__ import annotations

import argparse
from functools import partial

from any_agent.cli.export import add_session_filters
from any_agent.runtime.command_line import (
    add_program,
    add_trial_arguments,
    count,
    option,
    positive,
)

_DESCRIPTION = """\
Grade recorded sessions anew by a function of yours, compare with the rewards that they had, and
train on them if you like. Nothing is sampled, and nothing of the run is changed. The sessions are
read from the journals and archives of all ranks, whether the service runs or not.
"""
_EPILOG = """\
GRADER is module.function, as for sessions.grader: it takes a session as a dictionary (session_id,
mode, task_id, metadata, feedback, interactions with messages and output_message) and returns a
number, or several by name, which sessions.reward_weights add up; or, by the ids of calls, those of
its calls. It runs in processes of its own.

--out has a line of JSON for each session: session_id, task_id, group_id, state, old, new, rewards
(the grader's by name, or by call), problem (why there is no new one). old is the reward that the
session had: the final one, else the mean of its calls'; new is the same of the new ones. An
interrupted run goes on where it was, with the same GRADER and file; sessions with a problem are
graded again.

The summary has both means, their rank correlation, the pairs of sessions of one group that change
their order, the groups that would teach nothing before and after, and the sessions whose reward
changed most.

--train writes a new model folder: the trial's latest checkpoint, trained on the sessions with their
new rewards as the run would have been, with its settings and those given here. Training sessions
are taken that have ended, also those that the run was trained on. Tokens that weights
of more than rollout.eta steps ago have sampled are masked, and sessions of such tokens alone are
left out; with rollout.eta=N more are taken, whose importance weights are further from 1.

Exit codes: 0 all graded, 1 something could not be graded or read, 2 wrong input, 130 interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_program(
        commands,
        "regrade",
        "proxy_ext.export.regrade",
        add_regrade_arguments,
        help="grade recorded sessions by another function, compare, and train on them",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )


def add_regrade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("grader", metavar="GRADER", help="the function, module.function")
    add = partial(option, parser)
    add_session_filters(parser)
    add(
        "--out FILE",
        "the file to write, or to go on with (default regraded.jsonl)",
        default="regraded.jsonl",
    )
    add("--workers N", "processes that grade (default: a core each)", type=count(256))
    add("--timeout S", "the most seconds of one grade (default 60)", type=positive, default=60.0)
    add("--train DIR", "then train on them: the new folder of the model")
    add("--json", "print the summary as JSON")
    add_trial_arguments(parser)
