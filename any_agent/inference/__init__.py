"""Trained models without a service, by experiment and trial or on running engines."""

from any_agent.inference.engine import LocalModel, RemoteSGLangEngine, load_engine

__all__ = ["LocalModel", "RemoteSGLangEngine", "load_engine"]
