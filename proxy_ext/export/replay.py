"""The program that `any-agent replay` starts: a recorded session against other weights."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from any_agent.auth.access import run_dir_of
from any_agent.cli.replay import add_replay_arguments
from any_agent.config import LOOPBACK, Config, load_config
from any_agent.errors import AnyAgentError, ConfigError, StartupError
from any_agent.inference import RemoteSGLangEngine
from any_agent.inference.text_codec import TextCodec, words_of
from any_agent.inference.weights_source import WeightsSource, find_weights_source
from any_agent.launcher.trial import find_trial, newest_weights
from any_agent.record import InteractionTree, is_frozen, lacks_texts
from any_agent.runtime.command_line import CommandParser, guarded, overrides_of, parse, printable
from any_agent.types import Interaction, Message, ModelRequest
from proxy_ext.archive.records import ArchiveRecord
from proxy_ext.export.comparison import Comparison, not_comparable, sampling_of, shown_message
from proxy_ext.export.forced_logprobs import Progress, call_logprobs, load_forward
from proxy_ext.export.reader import RunSessions, find_session, newest_session
from proxy_ext.export.recorded_request import tools_of
from proxy_ext.export.replay_all import replay_all
from proxy_ext.export.replay_endpoint import EndpointReplay

_AT_ONCE = 8  # answers that are sampled at the same time


@dataclass(slots=True)
class ReplayedCall:
    """One recorded call, and what other weights make of it."""

    number: int
    interaction_id: str
    prompt_tokens: int
    output_ids: list[int]
    versions: list[int]
    temperature: float
    untrainable_reason: str | None
    bound: int
    """The tokens of a trained call that a grammar decided: their recorded log-probabilities are not
    the model's own."""
    recorded_logprobs: list[float]
    recorded: Message
    logprobs: list[float]
    comparison: Comparison | None
    sampled_by: str | None = None
    """The adapter that sampled it, which these weights lack: nothing is compared."""
    answer_ids: list[int] | None = None
    answer: Message | None = None
    problem: str | None = None
    """The reason why there is no answer."""

    @property
    def same(self) -> bool:
        return self.answer_ids == self.output_ids


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="any-agent replay")
    add_replay_arguments(parser)
    arguments = parse(parser, argv)
    if arguments.session is not None and "=" in arguments.session:
        # A setting, as an id never has this sign.
        arguments.overrides, arguments.session = [arguments.session, *arguments.overrides], None
    # Loading a model warns about much that has no meaning here.
    logging.disable(logging.WARNING)
    try:
        return guarded(lambda: replay(arguments))
    finally:
        logging.disable(logging.NOTSET)


def replay(arguments: argparse.Namespace) -> int:
    """Compare the session that the arguments name; print the result. Raises AnyAgentError."""
    place = load_config(arguments.config, overrides_of(arguments))
    own = [f"root={place.root}", f"user={place.user}", f"server.host={LOOPBACK[0]}"]
    config = load_config(find_trial(place), own, environ={})
    _require_one_way(arguments)
    if _chooses(arguments) and arguments.session is not None:
        raise ConfigError("name one session, or choose several by options, not both")
    if arguments.url is not None:
        return _at_endpoint(arguments, config)
    if _chooses(arguments):
        return replay_all(
            arguments, RunSessions.of(arguments, settings=config), _weights(arguments, config)
        )
    record = _record(config, arguments.session or _newest(config))
    source = _weights(arguments, config)
    tree = InteractionTree.from_interactions(c for c in record.interactions if not is_frozen(c))
    codec = words_of(None, source.weights.path, source.config.model)
    if all("adapter" in node.request for node in tree):
        print(f"error: session {record.session['id']} has no call to compare", file=sys.stderr)
        return 1
    forward = load_forward(source, arguments.device)
    found = call_logprobs(tree, forward)
    calls = [_call(tree, node, k, found[node.id], codec) for k, node in enumerate(tree, 1)]
    asked = [call for call in calls if call.sampled_by is None]
    if not arguments.no_answers and asked:
        with _engine(arguments, source) as engine:
            asyncio.run(_answer(engine, tree, asked, arguments, codec))
    if arguments.json:
        print(json.dumps(_as_json(record, source, calls)))
    else:
        print("\n".join(_as_text(record, source, calls, codec)))
    return 0


def _chooses(arguments: argparse.Namespace) -> bool:
    """Return whether the arguments choose among the sessions, instead of naming one."""
    chosen = (arguments.rank, arguments.state, arguments.task, arguments.since)
    return arguments.all or any(value is not None for value in chosen)


def _require_one_way(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options of weights beside a URL, and for those of a URL without one."""
    weights = {
        "--version": arguments.version,
        "--step": arguments.step,
        "--device": None if arguments.device == "auto" else arguments.device,
        "--no-answers": arguments.no_answers or None,
    }
    service = {"--concurrency": arguments.concurrency, "--timeout": arguments.timeout}
    foreign = weights if arguments.url is not None else service
    wrong = [name for name, value in foreign.items() if value is not None]
    if wrong and arguments.url is not None:
        raise ConfigError(f"{wrong[0]} is for weights, and --url names a service: leave one out")
    if wrong:
        raise ConfigError(f"{wrong[0]} is for a service: name it with --url")


def _at_endpoint(arguments: argparse.Namespace, config: Config) -> int:
    """Compare with the answers of another service; raises as :meth:`RunSessions.of`."""
    run = EndpointReplay(arguments, config)
    if _chooses(arguments):
        read = RunSessions.of(arguments, settings=config).read(run.report)
        return run.run((record for _, record in read), whole=False)
    record = _record(config, arguments.session or _newest(config))
    return run.run((each for each in (record,)), whole=True)


def _newest(config: Config) -> str:
    """Return the id of the newest session that has ended; ConfigError if there is none."""
    found = newest_session(run_dir_of(config))
    if found is None:
        raise ConfigError(
            f"no session in the journals of {run_dir_of(config).path} has ended with a call: name "
            "one of the archives, whose ids `any-agent export` has (session.id)"
        )
    return found


def _record(config: Config, session_id: str) -> ArchiveRecord:
    try:
        found = find_session(
            run_dir_of(config), session_id, lambda problem: print(problem, file=sys.stderr)
        )
    except ValueError as error:
        raise StartupError(f"session {session_id} is damaged: {error}") from None
    if found is None:
        raise ConfigError(
            f"there is no session {session_id} in {run_dir_of(config).path}. Those that there are: "
            "`any-agent sessions list`, while the service runs, or `any-agent export --experiment "
            f"{config.experiment} --trial {config.trial}`, of each line session.id"
        )
    return found


def _weights(arguments: argparse.Namespace, config: Config) -> WeightsSource:
    """Return the weights to compare with; raises as :func:`find_weights_source`."""
    if arguments.other is not None:
        found = find_weights_source(None, None, model=arguments.other, settings=config)
    else:
        version = arguments.version
        if version is None and arguments.step is None:
            newest = newest_weights(config)
            version = newest.version if newest is not None else 0
        found = find_weights_source(
            config.experiment,
            config.trial,
            user=config.user,
            root=config.root,
            step=arguments.step,
            version=version,
            settings=config,
        )
    assert found is not None
    return found


def _engine(arguments: argparse.Namespace, source: WeightsSource) -> RemoteSGLangEngine:
    """Load the weights into an engine, which `with` closes."""
    engine, config = RemoteSGLangEngine(), source.config
    if arguments.other is not None:
        return engine.initialize(model=arguments.other, device=arguments.device)
    return engine.initialize(
        config.experiment,
        config.trial,
        user=config.user,
        root=config.root,
        version=source.weights.version,
        device=arguments.device,
    )


# -- log-probabilities -----------------------------------------------------------------------------


def _call(
    tree: InteractionTree, node: Interaction, number: int, now: list[float], codec: TextCodec
) -> ReplayedCall:
    recorded = node.output_logprobs.tolist()
    message = node.output_message
    adapter = node.request.get("adapter")
    if lacks_texts(node):
        message = {"role": "assistant", "content": codec.decode(node.output_ids.tolist())}
    return ReplayedCall(
        number,
        node.id,
        len(tree.prompt_ids(node.id)),
        node.output_ids.tolist(),
        sorted(set(node.output_versions.tolist())),
        node.gconfig.temperature,
        node.untrainable_reason,
        int((node.loss_mask() == 0).sum()) if node.trainable else 0,
        recorded,
        message,
        now if adapter is None else [],
        Comparison.of(recorded, now) if adapter is None else None,
        adapter,
        problem=None if adapter is None else not_comparable(adapter),
    )


# -- answers ---------------------------------------------------------------------------------------


async def _answer(
    engine: RemoteSGLangEngine,
    tree: InteractionTree,
    calls: Sequence[ReplayedCall],
    arguments: argparse.Namespace,
    codec: TextCodec,
) -> None:
    """Sample an answer to each recorded prompt."""
    room = asyncio.Semaphore(_AT_ONCE)
    say = Progress()
    done = 0

    async def answer(call: ReplayedCall) -> None:
        nonlocal done
        node = tree[call.interaction_id]
        prompt = tree.prompt_ids(node.id).tolist()
        gconfig = sampling_of(node.gconfig, arguments)
        async with room:
            try:
                request = ModelRequest(input_ids=prompt, gconfig=gconfig)
                call.answer_ids = (await engine.agenerate(request)).output_ids
                call.answer = message_of(tree, node, prompt, call.answer_ids, codec)
            except AnyAgentError as error:
                call.problem = error.message
        done += 1
        say(f"{done} of {len(calls)} calls answered")

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(answer(call))


def message_of(
    tree: InteractionTree,
    node: Interaction,
    prompt: list[int],
    output: list[int],
    codec: TextCodec,
) -> Message:
    """Return an output as the message that an agent would get."""
    forced = int(node.request.get("forced", 0))
    parser = codec.chat.stream_parser(
        prompt_ids=prompt,
        tools=tools_of(tree, node) or None,
        stop=node.gconfig.stop,
        forced=prompt[len(prompt) - forced :],
    )
    parser.feed(output)
    return parser.finish()[1].to_message()


# -- the report ------------------------------------------------------------------------------------


def _whole(calls: Iterable[ReplayedCall]) -> Comparison | None:
    each = [call for call in calls if call.sampled_by is None]
    recorded = [value for call in each for value in call.recorded_logprobs]
    return Comparison.of(recorded, [value for call in each for value in call.logprobs])


def _as_json(
    record: ArchiveRecord, source: WeightsSource, calls: Sequence[ReplayedCall]
) -> dict[str, Any]:
    whole = _whole(calls)
    return {
        "session_id": record.session["id"],
        "state": record.session["state"],
        "against": {"version": source.weights.version, "path": str(source.weights.path)},
        "comparison": asdict(whole) if whole is not None else None,
        "calls": [
            asdict(call) | {"same": call.same if call.answer_ids is not None else None}
            for call in calls
        ],
    }


def _as_text(
    record: ArchiveRecord, source: WeightsSource, calls: Sequence[ReplayedCall], codec: TextCodec
) -> Iterator[str]:
    session, weights = record.session, source.weights
    count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
    yield f"session   {session['id']} ({session['state']}), {count}"
    yield f"against   version {weights.version}: {weights.path}"
    for call in calls:
        versions = ", ".join(map(str, call.versions)) or "none"
        yield ""
        yield (
            f"call {call.number:<4} {call.interaction_id}: {call.prompt_tokens} prompt tokens, "
            f"{len(call.output_ids)} sampled at T={call.temperature:g} under version {versions}"
            + (f"; untrained: {call.untrainable_reason}" if call.untrainable_reason else "")
            + (f"; {call.bound} of them decided by a grammar" if call.bound else "")
        )
        if call.sampled_by is None:
            yield f"logprobs  {_described(call.comparison, call.output_ids, codec)}"
        yield from shown_message("recorded", call.recorded)
        if call.problem is not None:
            yield f"now       no answer: {printable(call.problem)}"
        elif call.answer is not None and call.same:
            yield "now       the same"
        elif call.answer is not None:
            yield from shown_message("now", call.answer)
    if len(calls) > 1:
        yield ""
        ids = [id for call in calls if call.sampled_by is None for id in call.output_ids]
        yield f"all calls {_described(_whole(calls), ids, codec)}"
        answered = [call for call in calls if call.answer_ids is not None]
        if answered:
            same = sum(call.same for call in answered)
            yield f"          {same} of {len(answered)} answers are the same"


def _described(found: Comparison | None, ids: Sequence[int], codec: TextCodec) -> str:
    if found is None:
        return "no token was sampled"
    token = printable(codec.decode([ids[found.difference_max_at]]))
    return (
        f"mean {found.mean:.4f} nats, recorded {found.recorded_mean:.4f}; a token differs by "
        f"{found.difference_mean:.2g} on average, by {found.difference_max:.2g} at most (token "
        f"{found.difference_max_at + 1}, {token!r}); ratio {found.ratio:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
