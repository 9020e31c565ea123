"""`/v1/responses`: items to messages and back, and the shape of its answers."""

from any_agent.completions.responses.asked import parse_responses_request
from any_agent.completions.responses.call import ResponsesCall
from any_agent.completions.responses.encoder import ResponsesEncoder
from any_agent.completions.responses.parse import parse_responses
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    input_items,
    response_again,
)

__all__ = [
    "ResponsesCall",
    "ResponsesEncoder",
    "answer_of",
    "deleted_record",
    "input_items",
    "parse_responses",
    "parse_responses_request",
    "response_again",
]
