"""``any-agent replay``: its arguments.

`proxy_ext.export.replay`, which reads the journals, does the work. As a part of the proxy it is
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
    seconds,
)

_DESCRIPTION = """\
Compare a recorded session with other weights: the log-probabilities of the recorded answers under
them, token by token in the recorded context, and their own answers to the recorded prompts. The
session is read from the journals and archives, whether the service runs or not; nothing changes.
With --all, or options that choose sessions, many are compared by their log-probabilities alone.
With --url the recorded calls are sent to another service instead, and its answers are compared with
the recorded ones.
"""
_EPILOG = """\
Without --version, --step and --model the weights are the newest ones of the trial, which its
service serves. The log-probabilities are computed in float32, at each call's own temperature. A
call's ratio is the probability of one of its tokens under the other weights, divided by the
recorded one: the geometric mean over the tokens.

Each call keeps its recorded prompt: a new answer has no part in the later ones. It comes from the
trial's kind of engine if that runs here, else from the embedded one.

Of many sessions the sums are shown, and those of the sessions that scored better, or worse, than
the mean of their group: what training made more, and less, likely.

At --url, a service that speaks OpenAI's chat API, each call is sent with its recorded messages,
tools and sampling, and compared: the text and where it first differs, tool calls (arguments as JSON
values), the finish reason and the tokens; log-probabilities only where the service returns them and
they are of the same kind, over the tokens before the first one that differs, and where they are not
compared the reason is given. The key is read from OPENAI_API_KEY; without it none is sent. Calls of
frozen models are left out. With many sessions the calls that differ are shown, and with --json each
session is a line, the sums the last one.

Exit codes: 0 compared, 1 failed (with --url: a call has no answer), or nothing to compare, 2 wrong
input (no such session, version or model), 130 interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_program(
        commands,
        "replay",
        "proxy_ext.export.replay",
        add_replay_arguments,
        help="compare a recorded session with another version of the weights",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "session",
        nargs="?",
        metavar="SESSION",
        help="the session's id (default: the newest one that has ended)",
    )
    add = partial(option, parser)
    add("--all", "compare all sessions of the trial")
    add_session_filters(parser)
    weights = parser.add_mutually_exclusive_group()
    add = partial(option, weights)
    number = count(10**9, least=0)
    add("--version N", "the weights of this version; 0 is the initial model", type=number)
    add("--step N", "the checkpoint of this step", type=number)
    add(
        "--model MODEL",
        "a model's folder, which must have the same token ids; with --url the model's name there "
        "(default: as recorded)",
        dest="other",
    )
    add = partial(option, parser)
    add("--url URL", "a service to send the calls to, like https://example.com/v1")
    add("--concurrency N", "with --url: calls at once (default 8)", type=count(1000))
    add("--timeout S", "with --url: the most seconds of one call (default 120)", type=seconds)
    parser.add_argument(
        "--sampling",
        choices=("greedy", "recorded"),
        default="greedy",
        help="how new answers are sampled: greedily (default), or by the recorded parameters",
    )
    add("--no-answers", "compare log-probabilities only")
    most = count(10**6)
    add("--max-tokens N", "the most tokens of a new answer (default: as recorded)", type=most)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute (default auto: a GPU if there is one)",
    )
    add("--json", "print JSON, with the log-probabilities of each token")
    add_trial_arguments(parser)
