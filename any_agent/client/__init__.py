"""Clients of the service's HTTP API, and their transports."""

from any_agent.client.rl_client import RLClient as RLClient
