"""Sessions of agents that open none: which conversation a call goes on with, or that it begins one.

- A session is found by what is in the call, never by who sends it: an agent sets a URL and a key.
- Nothing is written for it but the session itself: after a restart its task's name and its tree
  tell the rest.
- Every choice is made between two awaits, so that two calls never take the same answer unawares.
"""
