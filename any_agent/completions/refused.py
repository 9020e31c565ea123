"""What the engine refused, in the agent's words."""

from __future__ import annotations

from any_agent.completions.params.call import ChatCall
from any_agent.errors import AnyAgentError, InvalidRequest


def in_the_agents_words(error: AnyAgentError, call: ChatCall) -> AnyAgentError:
    """A refused grammar, under the parameter that asked for it; any other error as it is."""
    if not (isinstance(error, InvalidRequest) and error.param == "grammar"):
        return error
    name = call.format_parameter or "response_format"
    return InvalidRequest(f"{name}: {error.message}", code=error.code, param=name)
