"""The laws of an engine, in the order in which a failure explains the later ones."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import asdict

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.config import Config
from any_agent.doctor import logprobs
from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe, EngineReply, probe_engine, reported_version
from any_agent.errors import AnyAgentError, ConfigError, InvalidRequest
from any_agent.rundir.layout import RunDir

ENGINE = Check(
    "engine",
    "is it running, and is its URL right? To check a service, its router or a rank, use --url",
)
INPUT = Check(
    "input",
    "start the engine so that it refuses a prompt that it cannot read completely (SGLang: without "
    "--allow-auto-truncate), or set engine.context_length to the length that it reads",
)
VERSIONS = Check(
    "versions",
    "restart the engine with the run's newest weights and their version (--weight-version)",
)
TOKENIZER = Check(
    "tokenizer",
    "start the engine with the tokenizer of model.path (SGLang: --tokenizer-path)",
)
STOPS = Check(
    "stops", "update the engine: it ends outputs at other places than SGLang's contract requires"
)
ABORTS = Check(
    "aborts",
    "update the engine: it goes on sampling after /abort_request, which wastes its slots, and "
    "weight updates wait for it",
)
PARAMETERS = Check("parameters", "is this an engine that speaks SGLang's native contract?")
_PLAIN_PROMPT = list(range(10, 30))
_LONG_PROMPT = 8192
_MAX_PROMPT = 1 << 18
_TOKENS = 24
_TEXT_TOKENS = 48
_PROMPTS = 4
_ABORT_TIMEOUT = 15.0
_PARAMETERS_OF = {
    "penalties": "frequency_penalty, presence_penalty, repetition_penalty",
    "grammar": "response_format",
    "structural_tag": "response_format together with tools",
    "seed": "seed in eval sessions",
    "bound_tokens": "training on what a grammar leaves free of an answer",
}


async def engine_laws(
    url: str,
    config: Config,
    chat: ChatFormat | None,
    *,
    key: str | None = None,
    run: RunDir | None,
    published: int | None,
) -> list[Verdict]:
    """Check every law; ``chat`` is None without a tokenizer, ``published`` is the newest version
    of ``run``, ``key`` the engine's."""
    prompt = chat.render([probes.USER], None) if chat is not None else _PLAIN_PROMPT
    async with probe_engine(url, key=key) as engine:
        try:
            info = await engine.info()
        except AnyAgentError as error:
            return [ENGINE.failed("answers", error.message)]
        out = [ENGINE.passed("answers", f"serves {info.get('model_path')}")]
        out += await INPUT.collect(_input(engine, prompt, config.engine.context_length))
        out += await VERSIONS.collect(_versions(engine, prompt, published))
        out += await logprobs.LAW.collect(logprobs.logprobs(engine, config.model.path, run, prompt))
        if chat is None:
            no_chat = "needs the model's tokenizer: give the model's folder"
            out += [law.unchecked("all", no_chat) for law in (TOKENIZER, STOPS)]
        else:
            out += await TOKENIZER.collect(_tokenizer(engine, chat, prompt))
            out += await STOPS.collect(stops(engine, chat, prompt))
        out += await ABORTS.collect(_aborts(engine, prompt))
        out += await PARAMETERS.collect(_parameters(engine))
        return out


async def _input(
    engine: EngineProbe, prompt: list[int], configured: int | None
) -> AsyncIterator[Verdict]:
    """Check that the engine reads every id of a prompt, and refuses one that is too long."""
    yield await _read_prompt(engine, "short prompt", prompt)
    try:
        context = await engine.context_length()
    except ConfigError as error:
        if configured is None:
            yield INPUT.failed("context length", error.message, "set engine.context_length")
            return
        context = configured
    if configured is not None and configured > context:
        seen = f"engine.context_length is {configured}, the engine's is {context}"
        yield INPUT.failed("context length", seen, f"set engine.context_length={context}")
    long = _repeat(prompt, min(context - 8, _LONG_PROMPT))
    yield await _read_prompt(engine, "long prompt", long)
    case, count = "too long a prompt", context + 16
    if count > _MAX_PROMPT:
        yield INPUT.unchecked(case, f"a prompt beyond a context of {context} tokens is too costly")
        return
    try:
        reply = await engine.ask(_repeat(prompt, count), strict=False, max_new_tokens=1)
    except InvalidRequest:
        yield INPUT.passed(case, f"{count} ids are refused, where the context has {context}")
        return
    seen = (
        f"the engine answers a prompt of {count} ids, where its context has {context}: "
        f"it has read {reply.prompt_tokens}"
    )
    yield INPUT.failed(case, seen)


async def _read_prompt(engine: EngineProbe, case: str, ids: list[int]) -> Verdict:
    reply = await engine.ask(ids, strict=False, max_new_tokens=1)
    if reply.prompt_tokens is None:
        return INPUT.failed(case, "the engine does not report how many ids it has read")
    if reply.prompt_tokens != len(ids):
        seen = f"the engine has read {reply.prompt_tokens} of {len(ids)} ids"
        return INPUT.failed(case, f"{seen}: it truncates prompts, or adds to them")
    return INPUT.passed(case, f"{len(ids)} ids sent, {len(ids)} read")


def _repeat(ids: list[int], count: int) -> list[int]:
    return (ids * (count // len(ids) + 1))[:count]


async def _versions(
    engine: EngineProbe, prompt: list[int], published: int | None
) -> AsyncIterator[Verdict]:
    """Compare the version of the engine with the run's, and with that of its tokens."""
    info = await engine.info()
    reported, version = info.get("weight_version"), reported_version(info)
    if version is None:
        seen = f"the engine calls its weights {reported!r}, which is no number and not 'default'"
        yield VERSIONS.failed("reported", seen)
        return
    yield VERSIONS.passed("reported", f"{reported!r}")
    if published is None:
        yield VERSIONS.unchecked("published", "the version that the run has published is unknown")
    elif published == version:
        yield VERSIONS.passed("published", f"{version}, as the run's newest")
    else:
        seen = f"the engine serves version {version}, the run's newest is {published}"
        yield VERSIONS.failed("published", seen)
    reply = await engine.ask(prompt, max_new_tokens=4, ignore_eos=True)
    # An update may come in between: the version before it and the one after it are both right.
    after = reported_version(await engine.info())
    if set(reply.versions) <= {version, after}:
        yield VERSIONS.passed("tokens", f"{len(reply.versions)} tokens of version {version}")
    else:
        seen = f"tokens of version {reply.versions}, from an engine that serves {version}"
        yield VERSIONS.failed("tokens", seen)


async def _tokenizer(
    engine: EngineProbe, chat: ChatFormat, prompt: list[int]
) -> AsyncIterator[Verdict]:
    """Compare the text of sampled ids and the size of the vocabulary."""
    yield _same_text(await engine.ask(prompt, max_new_tokens=_TEXT_TOKENS, ignore_eos=True), chat)
    info = {**await engine.start_options(), **await engine.info()}
    size = info.get("vocab_size")
    if not isinstance(size, int):
        yield TOKENIZER.unchecked("vocabulary", "the engine does not report its vocabulary's size")
        return
    seen = f"{chat.vocab_size} ids here, the engine knows {size}"
    enough = size >= chat.vocab_size
    yield (TOKENIZER.passed if enough else TOKENIZER.failed)("vocabulary", seen)


def _same_text(reply: EngineReply, chat: ChatFormat) -> Verdict:
    if not reply.text:
        return TOKENIZER.unchecked("text", "the engine returns no text")
    if any(i >= chat.vocab_size for i in reply.ids):
        # Padding rows, which a trained model never samples and a random one does.
        known = [i for i in reply.ids if i < chat.vocab_size]
        if len(known) < len(reply.ids) // 2:
            return TOKENIZER.failed("text", "the engine samples ids that are unknown here")
        return TOKENIZER.unchecked("text", "ids beyond the vocabulary were sampled")
    ours = [
        str(chat.tokenizer.decode(reply.ids, skip_special_tokens=skip)) for skip in (True, False)
    ]
    # A stream's last character may be incomplete; decoders differ in the white space at its ends.
    if any(_trim(reply.text) == _trim(text) for text in ours):
        return TOKENIZER.passed("text", f"{len(reply.ids)} sampled ids spell the same text")
    seen = f"{reply.ids[:6]}... is {ours[1][:32]!r} here, and {reply.text[:32]!r} there"
    return TOKENIZER.failed("text", seen)


def _trim(text: str) -> str:
    return text.strip().rstrip("\ufffd")


async def stops(engine: EngineProbe, chat: ChatFormat, prompt: list[int]) -> AsyncIterator[Verdict]:
    """Check that length, stop strings and stop tokens end an output where they must."""
    free = await engine.ask(prompt, max_new_tokens=_TOKENS, temperature=0, ignore_eos=True)
    if (len(free.ids), free.reason) == (_TOKENS, "length"):
        yield STOPS.passed("length", f"after {_TOKENS} tokens, as requested")
    else:
        seen = f"{len(free.ids)} tokens ({free.reason}), where {_TOKENS} were requested"
        yield STOPS.failed("length", seen)
    prompt, answer = await _longest_answer(engine, chat, prompt)
    yield await _stop_string(engine, chat, prompt, answer)
    yield await _stop_token(engine, prompt, answer)


async def _longest_answer(
    engine: EngineProbe, chat: ChatFormat, prompt: list[int]
) -> tuple[list[int], list[int]]:
    """Return a prompt and the ids that the model samples after it before its turn ends.

    A model that was trained to answer in one word says more after a shortened prompt.
    """
    ends = set(chat.stop_token_ids)
    longest: tuple[list[int], list[int]] = (prompt, [])
    for length in range(len(prompt), max(0, len(prompt) - _PROMPTS), -1):
        reply = await engine.ask(
            prompt[:length], max_new_tokens=_TOKENS, temperature=0, ignore_eos=True
        )
        end = next((k for k, i in enumerate(reply.ids) if i in ends), len(reply.ids))
        if end > len(longest[1]):
            longest = prompt[:length], reply.ids[:end]
        if end >= _TOKENS // 2:
            break
    return longest


async def _stop_string(
    engine: EngineProbe, chat: ChatFormat, prompt: list[int], answer: list[int]
) -> Verdict:
    case, stop = "stop string", _stop_string_of(chat.decode(answer))
    if stop is None:
        return STOPS.unchecked(case, "the model's answers have no text that could end them")
    reply = await engine.ask(
        prompt, max_new_tokens=_TOKENS, temperature=0, ignore_eos=True, stop=(stop,)
    )
    text, before = chat.decode(reply.ids), chat.decode(reply.ids[:-1])
    if reply.reason == "length" and stop not in text:
        return STOPS.unchecked(case, f"{stop!r} was not sampled a second time")
    if reply.reason != "stop" or reply.matched != stop:
        seen = f"{stop!r} was sampled, and the end is {reply.reason} ({reply.matched!r})"
        return STOPS.failed(case, seen)
    if stop not in text:
        return STOPS.failed(case, f"the ids are cut before {stop!r}, which was sampled")
    if stop in before:
        return STOPS.failed(case, f"the output continues after {stop!r}")
    cut = "" if reply.text is None else ", its text cut" * (stop not in reply.text)
    return STOPS.passed(case, f"at the token that completes {stop!r}{cut}")


def _stop_string_of(text: str) -> str | None:
    """Return some characters from the middle that do not occur earlier in the text."""
    for length in (3, 2, 1):
        for at in range(len(text) // 3, len(text) - length + 1):
            part = text[at : at + length]
            plain = part.isprintable() and part.strip() == part
            # Special tokens have no text in an engine that skips them.
            if plain and not set(part) & set("<>\ufffd") and text.find(part) == at:
                return part
    return None


async def _stop_token(engine: EngineProbe, prompt: list[int], answer: list[int]) -> Verdict:
    case = "stop token"
    if not answer:
        return STOPS.unchecked(case, "the model ends its answers at once")
    start = answer[: len(answer) // 3]
    stop = next((i for i in answer[len(start) :] if i not in start), answer[0])
    reply = await engine.ask(prompt, max_new_tokens=_TOKENS, temperature=0, stop_token_ids=(stop,))
    if reply.reason == "length" and stop not in reply.ids:
        return STOPS.unchecked(case, f"{stop} was not sampled a second time")
    if reply.reason == "stop" and reply.matched != stop and stop not in reply.ids:
        return STOPS.unchecked(case, "the model ended its answer before")
    if reply.reason == "stop" and reply.ids[-1:] == [stop] and reply.ids.count(stop) == 1:
        return STOPS.passed(case, f"at {stop}, which is kept")
    seen = f"{stop} must end the output, whose last ids are {reply.ids[-4:]} ({reply.reason})"
    return STOPS.failed(case, seen)


async def _aborts(engine: EngineProbe, prompt: list[int]) -> AsyncIterator[Verdict]:
    """Abort a request after its first tokens, and check that it ends with that reason."""
    limit = max(1, min(await engine.context_length() - len(prompt) - 8, 4096))
    rid = f"doctor-{uuid.uuid4().hex}"
    reason: str | None = None
    count = 0
    aborted = False
    try:
        async with (
            asyncio.timeout(_ABORT_TIMEOUT),
            aclosing(engine.stream(prompt, rid, max_new_tokens=limit, ignore_eos=True)) as chunks,
        ):
            async for chunk in chunks:
                count += len(chunk.output_ids)
                reason = chunk.stop_reason
                if reason is not None:
                    break
                if not aborted:
                    await engine.abort(rid)
                    aborted = True
    except TimeoutError:
        yield ABORTS.failed("request", f"still sampled {_ABORT_TIMEOUT:g} s after it was aborted")
        return
    if reason == "abort":
        yield ABORTS.passed("request", f"ended after {count} of {limit} tokens")
    elif count >= limit:
        yield ABORTS.unchecked("request", f"all {limit} tokens were there before the abort")
    else:
        yield ABORTS.failed("request", f"the aborted request ended with the reason {reason}")


async def _parameters(engine: EngineProbe) -> AsyncIterator[Verdict]:
    """List the parameters that agents may use; the service refuses the others by name."""
    for name, able in asdict(await engine.capabilities()).items():
        names = _PARAMETERS_OF.get(name, name)
        if able:
            yield PARAMETERS.passed(name, f"supported: {names}")
        else:
            yield PARAMETERS.declined(name, f"this engine does not support {names}")
    incremental = (await engine.start_options()).get("incremental_streaming_output")
    if incremental is False:
        yield PARAMETERS.declined(
            "incremental streams",
            "each event repeats the whole output, which is costly for long ones: start the engine "
            "with --incremental-streaming-output",
        )
    elif incremental:
        yield PARAMETERS.passed("incremental streams", "each event holds its new tokens only")
