"""What one engine and one vocabulary cannot do is refused, naming the parameter."""

from __future__ import annotations

from any_agent.completions.params.call import ChatCall
from any_agent.engine import Capabilities
from any_agent.errors import InvalidRequest, UnsupportedParameter

_PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def require_supported(call: ChatCall, engine: Capabilities, *, vocab_size: int) -> None:
    """UnsupportedParameter for what the engine cannot do; InvalidRequest for an id of no token."""
    gconfig = call.gconfig
    if call.top_logprobs and not engine.top_logprobs:
        raise _unsupported("top_logprobs" if call.messages else "logprobs")
    if gconfig.min_p and not engine.min_p:
        raise _unsupported("min_p")
    if gconfig.logit_bias and not engine.logit_bias:
        raise _unsupported("logit_bias")
    if gconfig.grammar is not None and not engine.grammar:
        raise _unsupported(call.format_parameter or "response_format")
    if gconfig.grammar is not None and call.tools and not engine.structural_tag:
        name = call.format_parameter or "response_format"
        raise UnsupportedParameter(
            f"{name} together with tools is not supported by this engine: leave one of them out, "
            "or start SGLang with --grammar-backend xgrammar",
            param=name,
        )
    neutral = {"repetition_penalty": 1.0}
    for name in _PENALTIES:
        if getattr(gconfig, name) != neutral.get(name, 0.0) and not engine.penalties:
            raise _unsupported(name)
    ids = {"logit_bias": dict(gconfig.logit_bias), "stop_token_ids": gconfig.stop_token_ids}
    for name, tokens in ids.items():
        if any(token >= vocab_size for token in tokens):
            raise InvalidRequest(
                f"{name} has a token id beyond the vocabulary of {vocab_size}", param=name
            )


def _unsupported(name: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{name} is not supported by this engine: leave it out", param=name)
