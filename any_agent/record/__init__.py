"""The record of a session: its tree of interactions, their rewards, and their exported forms."""

from __future__ import annotations

from any_agent.record.codec import pack_interaction as pack_interaction
from any_agent.record.codec import pack_trajectories as pack_trajectories
from any_agent.record.codec import unpack_interaction as unpack_interaction
from any_agent.record.codec import unpack_trajectories as unpack_trajectories
from any_agent.record.content_removal import has_reasoning as has_reasoning
from any_agent.record.content_removal import lacks_texts as lacks_texts
from any_agent.record.content_removal import strip_content as strip_content
from any_agent.record.export import concat_rows as concat_rows
from any_agent.record.export import export_rows as export_rows
from any_agent.record.export import individual_rows as individual_rows
from any_agent.record.export import interaction_row as interaction_row
from any_agent.record.export import to_json as to_json
from any_agent.record.export import to_tensors as to_tensors
from any_agent.record.exported_interaction import (
    CompletionWithTokenLogpReward as CompletionWithTokenLogpReward,
)
from any_agent.record.exported_interaction import (
    InteractionWithTokenLogpReward as InteractionWithTokenLogpReward,
)
from any_agent.record.exported_interaction import chat_completion_of as chat_completion_of
from any_agent.record.interaction_tree import FROZEN_MODEL as FROZEN_MODEL
from any_agent.record.interaction_tree import InteractionTree as InteractionTree
from any_agent.record.interaction_tree import frozen_id as frozen_id
from any_agent.record.interaction_tree import is_frozen as is_frozen
from any_agent.record.request_prefix_cache import RequestPrefix as RequestPrefix
from any_agent.record.reward_propagation import discarded as discarded
from any_agent.record.reward_propagation import propagate_rewards as propagate_rewards
from any_agent.record.reward_propagation import session_score as session_score
from any_agent.record.reward_propagation import was_received as was_received
from any_agent.record.trainability import TrainabilityWatch as TrainabilityWatch
from any_agent.record.trainability import count_calls as count_calls
from any_agent.types import Row as Row
