"""The record of a session: its tree of interactions, their rewards, and their exported forms."""

from __future__ import annotations

from any_agent.record.codec import (
    pack_interaction,
    pack_trajectories,
    unpack_interaction,
    unpack_trajectories,
)
from any_agent.record.content_removal import has_reasoning, lacks_texts, strip_content
from any_agent.record.export import (
    concat_rows,
    export_rows,
    individual_rows,
    interaction_row,
    to_json,
    to_tensors,
)
from any_agent.record.exported_interaction import (
    CompletionWithTokenLogpReward,
    InteractionWithTokenLogpReward,
    chat_completion_of,
)
from any_agent.record.interaction_tree import FROZEN_MODEL, InteractionTree, frozen_id, is_frozen
from any_agent.record.request_prefix_cache import RequestPrefix
from any_agent.record.reward_propagation import (
    discarded,
    propagate_rewards,
    session_score,
    was_received,
)
from any_agent.types import Row

__all__ = [
    "FROZEN_MODEL",
    "CompletionWithTokenLogpReward",
    "InteractionTree",
    "InteractionWithTokenLogpReward",
    "RequestPrefix",
    "Row",
    "chat_completion_of",
    "concat_rows",
    "discarded",
    "export_rows",
    "frozen_id",
    "has_reasoning",
    "individual_rows",
    "interaction_row",
    "is_frozen",
    "lacks_texts",
    "pack_interaction",
    "pack_trajectories",
    "propagate_rewards",
    "session_score",
    "strip_content",
    "to_json",
    "to_tensors",
    "unpack_interaction",
    "unpack_trajectories",
    "was_received",
]
