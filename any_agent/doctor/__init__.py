"""``any-agent doctor``: checks the laws of exact training.

A law is a function that yields a :class:`Verdict` for each case. The laws of the chat format
(`rendering`, `continuation`, `parsing`) need no engine; each rank's proxy checks them at its start.
Importing this package imports nothing heavy.
"""

from any_agent.doctor.verdict import CheckOutcome, Verdict

__all__ = ["CheckOutcome", "Verdict"]
