"""``any-agent export``: its arguments.

`proxy_ext.export`, which reads the journals, does the work. As a part of the proxy it is another
program, which replaces this one.
"""

from __future__ import annotations

import argparse
import textwrap
from functools import partial
from itertools import starmap

from any_agent.runtime.command_line import (
    add_program,
    add_trial_arguments,
    count,
    moment,
    number,
    option,
)

_DESCRIPTION = """\
Write the recorded sessions, from the journals and archives of all ranks, whether the service runs
or not. Each session appears once, in the order of creation. Nothing is leased or changed.
"""
FORMATS = {
    "jsonl": "JSON lines: whole sessions, or rows with --style",
    "parquet": "rows as a Parquet file (default --style individual)",
    "hf": "rows as a new folder for datasets.load_from_disk (default --style individual)",
    "sft": """JSON lines for any-agent sft: the rows of the best sessions of each group
(default --style concat; messages for a model with another tokenizer)""",
    "prompt-completion": """TRL's SFTTrainer: a line for each answer of the best sessions of each
group, a completion of the messages before it""",
    "preferences": """TRL's DPOTrainer: prompt, chosen, rejected, tools. Each line pairs a better
with a worse session of a group, and has the answers where they first differ""",
    "openai-chat": """OpenAI's fine-tuning: the conversations of the best sessions of each group;
answers that must not be trained on have weight 0""",
    "openai-preferences": "OpenAI's preference fine-tuning: the pairs of preferences",
    "atif": """Harbor's trajectories (ATIF-v1.7), one a line for each conversation, with each
call's token ids and logprobs""",
    "nemo-gym": """NeMo Gym's rollouts, one a line for each conversation of the sessions that
have a reward, with each call's token ids and logprobs""",
    "otel": """OpenTelemetry's traces (OTLP as JSON lines): a session is a trace, and its calls and
rewards are spans, under the ids of the live traces""",
}
"""The description of each format."""
_EPILOG = """\
Formats:
{formats}

parquet and hf need the extra [data]. The formats of best sessions and of pairs take the training
sessions that have a reward and no veto (or those of --state), and read everything twice. A group
is a group_id's, else a task_id's sessions; a session's score is the mean reward of its calls, as
in training.

With jsonl and no --style each line is a session: number, session (id, state, metadata, step, ...),
rewards (every reward that was ever set, with its giver and time) and interactions (ids, logprobs,
versions, messages; each holds what it adds to its parent). With a style each line is a row with its
reward propagated back through the session's tree: individual and concat give session_id,
interaction_id, group_id, task_id, state, reason, step, input_ids, loss_mask, logprobs, versions,
attention_mask, rewards; messages gives messages and tools of each conversation instead of the last
six, and its reward. In a session without any reward (open, aborted, rejected for want of a reward)
rewards and reward are null, not 0; in a session with rewards, calls without one of their own count
as 0. step is the step that trained on the session; where none did, reason says why: zero_variance,
for example, for a group that taught nothing because all of it scored alike.

With otel each line is an ExportTraceServiceRequest. The record does not have the end of a call, so
its span has no length. Texts are written with --content alone.

--out replaces a plain file once everything is written, and leaves it unchanged on a failure; a pipe
or a device is written to directly. A folder (hf) must be new.

Exit codes: 0 everything was written, 1 something could not be written (damaged, missing, or no
exact token sequence for --style concat; standard error names it), 2 wrong input, 141 the reader
closed the pipe.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add_program(
        commands,
        "export",
        "proxy_ext.export",
        add_export_arguments,
        help="write recorded sessions as JSON lines, tables, or data for fine-tuning",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(formats="\n".join(starmap(_listed, FORMATS.items()))),
    )


def _listed(name: str, text: str) -> str:
    return textwrap.indent(f"{name:<18}  " + text.replace("\n", "\n" + " " * 20), "  ")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add = partial(option, parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        metavar="FORMAT",
        default="jsonl",
        help="what to write (default jsonl), see below",
    )
    add_session_filters(parser)
    parser.add_argument(
        "--style",
        choices=("individual", "concat", "messages"),
        help="one row for each model call, for each token-exact conversation, or for each "
        "conversation's messages",
    )
    add(
        "--discount X",
        "discount of rewards per turn, with --style (default: the run's train.discount)",
        type=_discount,
    )
    most = count(1_000_000)
    add("--best N", "best sessions, or pairs, of each group (default 1)", type=most)
    add("--min-reward X", "only best sessions with at least this score", type=number)
    add("--margin X", "least difference of a pair's scores", type=number)
    add("--content", "with --format otel: the messages of the calls, too")
    add("--out FILE", "the file or folder to write (default: -, standard output)", default="-")
    add_trial_arguments(parser)


def add_session_filters(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose among a trial's sessions."""
    add = partial(option, parser)
    rank = count(999_999, least=0)
    add("--rank N", "only this rank's sessions (repeatable)", type=rank, action="append")
    add(
        "--state STATE",
        f"only sessions in this state (repeatable): {', '.join(_STATES)}",
        action="append",
        choices=_STATES,
    )
    add("--task ID", "only sessions of this task_id")
    add(
        "--since TIME",
        "only sessions opened since this time: 2026-01-31, 2026-01-31T12:00, or an age like 90m, "
        "12h, 7d; a time without a zone is local",
        type=moment,
    )


_STATES = (
    *("open", "awaiting_reward", "finalized", "leased", "trained", "rejected", "evaluated"),
    *("expired", "aborted"),
)


def _discount(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value
