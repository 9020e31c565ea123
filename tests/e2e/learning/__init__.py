"""Tiny tasks that a tiny model learns within minutes, as a researcher would set them up."""
