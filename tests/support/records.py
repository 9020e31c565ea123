"""Made-up interactions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    id_array,
    logprob_array,
)

Make = Callable[..., Interaction]


def make_interaction(
    id: str,
    parent: str | None = None,
    *,
    asked: str | None = None,
    prompt: Any = (1, 2, 3),
    output: Any = (4, 5),
    **more: Any,
) -> Interaction:
    """``make_interaction("b", "a", asked="x", reward=1.0)``."""
    n = len(output)
    values: dict[str, Any] = {
        "id": id,
        "session_id": "s",
        "parent_id": parent,
        "prompt_delta_ids": id_array(prompt),
        "output_ids": id_array(output),
        "output_logprobs": logprob_array(-np.arange(1, n + 1) / 8),
        "output_versions": id_array([7] * n),
        "message_delta": [{"role": "user", "content": id if asked is None else asked}],
        "output_message": {"role": "assistant", "content": f"answer {id}"},
        "finish_reason": "stop",
        "gconfig": GenerationHyperparameters(),
        "continuation": Continuation.ROOT if parent is None else Continuation.EXACT,
    }
    return Interaction(**values | more)
