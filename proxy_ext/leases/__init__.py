"""Handing finalized sessions to the trainer, once each."""
