"""What is kept of an interaction whose texts are not."""

from __future__ import annotations

import numpy as np

from any_agent.record import lacks_texts, pack_interaction
from any_agent.record.content_removal import has_reasoning, strip_content
from any_agent.types import GenerationHyperparameters
from tests.support.records import Make

SECRET = "the combination is 1234"


def test_no_text_is_left_of_an_interaction_whose_content_was_removed(make: Make) -> None:
    whole = make(
        "a",
        asked=SECRET,
        output_message={"role": "assistant", "content": SECRET, "reasoning_content": SECRET},
        tools=[{"type": "function", "function": {"name": "f", "description": SECRET}}],
        gconfig=GenerationHyperparameters(
            stop=(SECRET,), grammar=f'{{"regex":"{SECRET}"}}', temperature=0.5
        ),
        request={"recorded": {"user": SECRET}, "overridden": {"x": SECRET}, "bound": [[0, 1]]},
        untrainable_reason="grammar",
    )
    kept = strip_content(whole)
    assert SECRET.encode() in pack_interaction(whole)
    assert SECRET.encode() not in pack_interaction(kept)
    assert lacks_texts(kept)
    assert not lacks_texts(whole)
    # What training needs is as it was.
    assert np.array_equal(kept.output_ids, whole.output_ids)
    assert (kept.untrainable_reason, kept.gconfig.temperature) == ("grammar", 0.5)
    assert kept.request == {"bound": [[0, 1]]}, "what the loss leaves out"
    assert has_reasoning(kept.output_message, f" {SECRET}\n")
    assert not has_reasoning(kept.output_message, "something else")
