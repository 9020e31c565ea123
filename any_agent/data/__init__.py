"""Datasets of tasks: reading them, and which item comes next."""

from any_agent.data.positions import Positions

__all__ = ["Positions"]
