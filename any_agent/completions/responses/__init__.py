"""`/v1/responses`: items to messages and back, and the shape of its answers."""

from any_agent.completions.responses.asked import responses_asked
from any_agent.completions.responses.call import ResponsesCall
from any_agent.completions.responses.encoder import ResponsesAnswer
from any_agent.completions.responses.parse import parse_responses
from any_agent.completions.responses.stored_response import (
    answer_of,
    deleted_record,
    input_items,
    response_again,
)

__all__ = [
    "ResponsesAnswer",
    "ResponsesCall",
    "answer_of",
    "deleted_record",
    "input_items",
    "parse_responses",
    "response_again",
    "responses_asked",
]
