"""What an agent may ask for: every parameter of all routes, in three classes, from one table."""

from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.capability_check import require_supported
from any_agent.completions.params.parameter import Parameter, UnknownParameters
from any_agent.completions.params.parse import parse_chat, parse_completion
from any_agent.completions.params.sampling import TOKEN_LIMITS, choice_seed
from any_agent.completions.params.table import PARAMETERS, TABLE, request_schema

__all__ = [
    "PARAMETERS",
    "TABLE",
    "TOKEN_LIMITS",
    "ChatCall",
    "Parameter",
    "UnknownParameters",
    "choice_seed",
    "parse_chat",
    "parse_completion",
    "request_schema",
    "require_supported",
]
