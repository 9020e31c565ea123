"""The APIs as agents speak them: requests in each one's shapes, answers as its own SDK reads them.

A conversation is a list of chat messages. An agent that changes APIs between turns writes what it
was answered by one in the other's shapes, as frameworks do; one that stays sends back what it got.
"""

from __future__ import annotations

from tests.support.laws.apis.chat import Chat
from tests.support.laws.apis.given import Api, Asked, Given, results_of
from tests.support.laws.apis.messages import Messages
from tests.support.laws.apis.responses import Responses

CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()
APIS: tuple[Api, ...] = (CHAT, RESPONSES, MESSAGES)
NEW: tuple[Api, ...] = (RESPONSES, MESSAGES)

__all__ = ["APIS", "CHAT", "MESSAGES", "NEW", "RESPONSES", "Api", "Asked", "Given", "results_of"]
