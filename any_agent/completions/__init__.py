"""Turns a request and a session's interaction tree into recorded completions."""
