"""any-agent: makes any OpenAI-compatible agent trainable by reinforcement learning."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from any_agent.client import RLClient
    from any_agent.config import Config, load_config
    from any_agent.direct import EngineOpenAI
    from any_agent.errors import AnyAgentError
    from any_agent.experiment import GRPOConfig, load_expr_config
    from any_agent.inference import LocalModel, load_engine
    from any_agent.types import Interaction, Trajectory
    from any_agent.workflow import ProxyWorkflow, RolloutWorkflow

__version__ = "0.1.0"

_HOMES = {
    "AnyAgentError": "any_agent.errors",
    "Config": "any_agent.config",
    "EngineOpenAI": "any_agent.direct",
    "GRPOConfig": "any_agent.experiment",
    "Interaction": "any_agent.types",
    "LocalModel": "any_agent.inference",
    "ProxyWorkflow": "any_agent.workflow",
    "RLClient": "any_agent.client",
    "RolloutWorkflow": "any_agent.workflow",
    "Trajectory": "any_agent.types",
    "load_config": "any_agent.config",
    "load_engine": "any_agent.inference",
    "load_expr_config": "any_agent.experiment",
}

__all__ = [
    "AnyAgentError",
    "Config",
    "EngineOpenAI",
    "GRPOConfig",
    "Interaction",
    "LocalModel",
    "ProxyWorkflow",
    "RLClient",
    "RolloutWorkflow",
    "Trajectory",
    "__version__",
    "load_config",
    "load_engine",
    "load_expr_config",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import any_agent` itself stays light."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'any_agent' has no attribute {name!r}")
    return getattr(import_module(home), name)
