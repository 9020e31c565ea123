"""Trained models without a service: by experiment and trial, or at engines that run."""

from any_agent.inference.engine import LocalModel, RemoteSGLangEngine, load_engine

__all__ = ["LocalModel", "RemoteSGLangEngine", "load_engine"]
