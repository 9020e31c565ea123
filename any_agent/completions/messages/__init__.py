"""Anthropic's `/v1/messages`: its requests as calls, and its answers.

A request becomes the same ``ChatCall`` that a chat request does, so recording, continuation and
keys are those of chat, and a session may go from one API to another. LiteLLM's adapter is not used:
it re-encodes tool arguments, drops the parts by which an answer is recognised when it comes back,
and would be imported for a few dozen lines.
"""
