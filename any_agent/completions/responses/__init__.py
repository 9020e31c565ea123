"""OpenAI's `/v1/responses`: items to messages and back, and its answers."""
