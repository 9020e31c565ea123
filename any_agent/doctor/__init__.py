"""``any-agent doctor``: proves the laws for a model, a template, an engine or a running service.

A law is a function that yields a :class:`Verdict` for each case; laws of a kind stand in one file.
Those of the chat format (`rendering`, `continuation`, `parsing`) need no engine and run at each
start of a rank's proxy, too. Importing this package imports nothing heavy.
"""

from any_agent.doctor.verdict import CheckOutcome, Verdict

__all__ = ["CheckOutcome", "Verdict"]
