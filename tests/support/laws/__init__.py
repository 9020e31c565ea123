"""The product's laws, for each family of chat formats: see ``docs`` on exactness.

Ids: the engine sees what is recorded. Continuation: a child's prompt begins with its parent's
prompt and output, and goes on as the template writes. The agent's message is what the recorded
ids say. Log-probabilities are those of a fresh forward pass; versions and masks are per token.
"""
