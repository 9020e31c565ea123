"""Parsing of sampled ids into text, reasoning and tool calls, at the end or as they come."""
