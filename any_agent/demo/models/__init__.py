"""Tiny models, made by code and taught in seconds."""
