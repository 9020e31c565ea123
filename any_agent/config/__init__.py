"""All settings, as one tree of sections."""

from any_agent.config.base import LOOPBACK, NAME_PATTERN, Name
from any_agent.config.cluster import ClusterConfig
from any_agent.config.load import (
    ENV_PREFIX,
    SECRET_VARIABLES,
    import_plugins,
    known_keys,
    load_config,
    load_resolved,
)
from any_agent.config.schema import Config
from any_agent.config.serving import (
    EngineConfig,
    FrozenConfig,
    ModelConfig,
    SamplingConfig,
    ServerConfig,
)
from any_agent.config.sessions import MAX_REWARD_WEIGHT, SessionConfig
from any_agent.config.training import (
    AgentConfig,
    DatasetConfig,
    EvalConfig,
    RolloutConfig,
    TrainConfig,
)

__all__ = [
    "ENV_PREFIX",
    "LOOPBACK",
    "MAX_REWARD_WEIGHT",
    "NAME_PATTERN",
    "SECRET_VARIABLES",
    "AgentConfig",
    "ClusterConfig",
    "Config",
    "DatasetConfig",
    "EngineConfig",
    "EvalConfig",
    "FrozenConfig",
    "ModelConfig",
    "Name",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "SessionConfig",
    "TrainConfig",
    "import_plugins",
    "known_keys",
    "load_config",
    "load_resolved",
]
