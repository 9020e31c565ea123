"""All settings, as one tree of sections."""

from any_agent.config.base import LOOPBACK as LOOPBACK
from any_agent.config.base import NAME_PATTERN as NAME_PATTERN
from any_agent.config.base import Name as Name
from any_agent.config.cluster import ClusterConfig as ClusterConfig
from any_agent.config.load import ENV_PREFIX as ENV_PREFIX
from any_agent.config.load import SECRET_VARIABLES as SECRET_VARIABLES
from any_agent.config.load import SECRETS as SECRETS
from any_agent.config.load import import_plugins as import_plugins
from any_agent.config.load import known_keys as known_keys
from any_agent.config.load import load_config as load_config
from any_agent.config.load import load_resolved as load_resolved
from any_agent.config.load import secret_variables as secret_variables
from any_agent.config.schema import Config as Config
from any_agent.config.serving import EngineConfig as EngineConfig
from any_agent.config.serving import FrozenConfig as FrozenConfig
from any_agent.config.serving import ModelConfig as ModelConfig
from any_agent.config.serving import SamplingConfig as SamplingConfig
from any_agent.config.serving import ServerConfig as ServerConfig
from any_agent.config.sessions import MAX_REWARD_WEIGHT as MAX_REWARD_WEIGHT
from any_agent.config.sessions import SessionConfig as SessionConfig
from any_agent.config.training import AgentConfig as AgentConfig
from any_agent.config.training import DatasetConfig as DatasetConfig
from any_agent.config.training import EvalConfig as EvalConfig
from any_agent.config.training import RolloutConfig as RolloutConfig
from any_agent.config.training import TrainConfig as TrainConfig
