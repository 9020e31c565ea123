"""Every law of an engine, in the order in which a failure explains the later ones."""

from __future__ import annotations

from any_agent.chat import ChatFormat
from any_agent.chat import format_probes as probes
from any_agent.config import Config
from any_agent.doctor import (
    aborts,
    logprobs,
    parameters,
    stops,
    tokenizer,
    versions,
)
from any_agent.doctor import (
    input_ids as input,
)
from any_agent.doctor.verdict import Check, Verdict, guarded
from any_agent.engine.sglang.probe import probe_engine
from any_agent.errors import AnyAgentError
from any_agent.rundir.layout import RunDir

LAW = Check("engine")
_NO_CHAT = "needs the model's tokenizer: give its folder"
_REACH = (
    "is it running, and is its URL right? A service, its router or a rank, is examined with --url"
)
_PLAIN = list(range(10, 30))


async def engine_laws(
    url: str,
    config: Config,
    chat: ChatFormat | None,
    *,
    run: RunDir | None,
    published: int | None,
) -> list[Verdict]:
    """``chat`` None: without the tokenizer. ``published``: the newest version of ``run``."""
    decode = chat.decode if chat is not None else lambda _: ""
    prompt = chat.render([probes.USER], None) if chat is not None else _PLAIN
    async with probe_engine(url, decode) as asker:
        try:
            info = await asker.model_info()
        except AnyAgentError as error:
            return [LAW.failed("answers", error.message, _REACH)]
        out = [LAW.passed("answers", f"serves {info.get('model_path')}")]
        length = config.engine.context_length
        for law, do, verdicts in (
            (input.LAW, input.DO, input.input_ids(asker, prompt, length)),
            (versions.LAW, versions.DO, versions.versions(asker, prompt, published)),
            (logprobs.LAW, logprobs.DO, logprobs.logprobs(asker, config.model.path, run, prompt)),
        ):
            out += await guarded(law, "all", do, verdicts)
        if chat is None:
            out += [law.unchecked("all", _NO_CHAT) for law in (tokenizer.LAW, stops.LAW)]
        else:
            for law, do, verdicts in (
                (tokenizer.LAW, tokenizer.DO, tokenizer.tokenizer(asker, chat, prompt)),
                (stops.LAW, stops.DO, stops.stops(asker, chat, prompt)),
            ):
                out += await guarded(law, "all", do, verdicts)
        out += await guarded(aborts.LAW, "all", aborts.DO, aborts.aborts(asker, prompt))
        out += await guarded(parameters.LAW, "all", parameters.DO, parameters.parameters(asker))
        return out
