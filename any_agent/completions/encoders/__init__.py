"""Encoders of answers, whole and streaming, one API a file."""
