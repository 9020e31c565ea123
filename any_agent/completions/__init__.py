"""One request + one interaction tree -> its recorded completions."""

from any_agent.completions.call_types import (
    Choice,
    Completed,
    Completion,
    Delta,
    Head,
    Prepared,
    choice_ids,
    completion_of,
)
from any_agent.completions.completer import VERSION_GONE, Completer, ContinuationPoint
from any_agent.completions.params import (
    TOKEN_LIMITS,
    ChatCall,
    parse_chat,
    parse_completion,
    require_supported,
)
from any_agent.completions.top_logprobs import PackedTopLogprobs, TopLogprobs, top_logprobs_of

__all__ = [
    "TOKEN_LIMITS",
    "VERSION_GONE",
    "ChatCall",
    "Choice",
    "Completed",
    "Completer",
    "Completion",
    "ContinuationPoint",
    "Delta",
    "Head",
    "PackedTopLogprobs",
    "Prepared",
    "TopLogprobs",
    "choice_ids",
    "completion_of",
    "parse_chat",
    "parse_completion",
    "require_supported",
    "top_logprobs_of",
]
