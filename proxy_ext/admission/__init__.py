"""Opening sessions: slots, groups, tenants' quotas, and sessions of agents that open none.

An implicit session is found by the content of a call, never by its sender: an agent sets a URL and
a key. Only the session itself is written for it: after a restart its task's name and its tree give
the rest. Every choice is made between two awaits, so that two calls never take one answer unawares.
"""
