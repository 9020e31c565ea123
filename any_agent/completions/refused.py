"""What is refused behind the parser, in the agent's words."""

from __future__ import annotations

from any_agent.completions.params.call import ChatCall
from any_agent.errors import AnyAgentError, InvalidRequest


def with_request_parameter(error: AnyAgentError, call: ChatCall) -> AnyAgentError:
    """A refused grammar, under the parameter that asked for it; a refused conversation, under what
    the request calls it; any other error as it is."""
    if not isinstance(error, InvalidRequest) or error.param is None:
        return error
    if error.param == "grammar":
        name = call.format_parameter or "response_format"
        return InvalidRequest(f"{name}: {error.message}", code=error.code, param=name)
    if call.prompt_parameter != "messages" and error.param.partition("[")[0] == "messages":
        # Its parts have other names there, and were checked under those.
        error.param = call.prompt_parameter
    return error
