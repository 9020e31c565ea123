"""Sampled ids to text, reasoning and tool calls, whole or while they are sampled."""
