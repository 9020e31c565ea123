"""Made-up episodes: sessions of one or more turns, as the trainer receives them."""

from __future__ import annotations

import numpy as np

from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    Trajectory,
    id_array,
    logprob_array,
)
from any_agent.workflow import Episode


def interaction(
    id: str,
    parent: str | None = None,
    *,
    session: str = "s",
    version: int = 0,
    reward: float | None = None,
    logprob: float = -3.0,
    untrainable: str | None = None,
    output: tuple[int, ...] = (8, 9),
) -> Interaction:
    """Three tokens of prompt, two of output unless they are given."""
    return Interaction(
        id=id,
        session_id=session,
        parent_id=parent,
        prompt_delta_ids=id_array([5, 6, 7]),
        output_ids=id_array(list(output)),
        output_logprobs=logprob_array(np.full(len(output), logprob)),
        output_versions=id_array([version] * len(output)),
        message_delta=[{"role": "user", "content": id}],
        output_message={"role": "assistant", "content": f"answer {id}"},
        finish_reason="stop",
        gconfig=GenerationHyperparameters(),
        continuation=Continuation.ROOT if parent is None else Continuation.EXACT,
        untrainable_reason=untrainable,
        reward=reward,
    )


def session(
    id: str, reward: float, *, turns: int = 1, group: str = "g", **fields: object
) -> Trajectory:
    """A chain of turns; the last one has the reward."""
    nodes: list[Interaction] = []
    for k in range(turns):
        parent = nodes[-1].id if nodes else None
        nodes.append(interaction(f"{id}-{k}", parent, session=id, **fields))  # type: ignore[arg-type]
    return Trajectory(id, group, nodes, final_reward=reward)


def pair(name: str, **fields: object) -> Episode:
    """A group of two sessions, one of them better; with equal tokens nothing could be learned."""
    return [
        session(f"{name}-good", 1.0, group=name, **fields),
        session(f"{name}-bad", 0.0, group=name, **{"output": (8, 4)} | fields),
    ]
