"""Opening sessions, also for agents that open none.

An implicit session is found by the content of a call, never by its sender, because an agent sets
only a URL and a key. Only the session itself is stored: after a restart its task's name and its
tree give the rest. Each choice is made between two awaits, so that two calls never continue one
answer by accident.
"""
