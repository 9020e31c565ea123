"""The log-probabilities of recorded answers under other weights, each in its recorded context."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from any_agent.doctor.forward_pass import Forward
from any_agent.errors import ConfigError, StartupError
from any_agent.inference.weights_source import WeightsSource
from any_agent.record import InteractionTree
from any_agent.types import GenerationHyperparameters, Interaction

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, with log-probabilities at temperature 1, in all engines."""
_QUIET = 2.0  # seconds between two lines of progress


def load_forward(source: WeightsSource, device: str) -> Forward:
    """Load the weights for forward passes; StartupError where they cannot be."""
    import torch

    path = str(source.weights.path)
    print(f"loading {path}", file=sys.stderr, flush=True)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return Forward(path, device)
    except Exception as error:
        # Foreign code: whatever it raises is about the folder or the machine.
        why = f"{type(error).__name__}: {error}"[:300]
        raise StartupError(f"the weights in {path} cannot be loaded: {why}") from error


def call_logprobs(tree: InteractionTree, forward: Forward) -> dict[str, list[float]]:
    """Return the log-probabilities of each call's output under the weights, by the call's id.

    Raises ConfigError for ids that these weights do not have.
    """
    nodes = list(tree)
    highest = max((int(ids.max()) for n in nodes for ids in _ids(n) if len(ids)), default=0)
    if highest >= forward.vocab_size:
        raise ConfigError(
            f"the weights have {forward.vocab_size} token ids, and the session has the id "
            f"{highest}: it was recorded with another tokenizer"
        )
    found: dict[str, list[float]] = {}
    continued = {node.parent_id for node in nodes}
    say = Progress()
    for leaf in nodes:
        if leaf.id not in continued:
            found |= _path_logprobs(forward, tree.path(leaf.id), found)
            say(f"{len(found)} of {len(nodes)} calls compared")
    return found


def _ids(node: Interaction) -> tuple[Any, Any]:
    return node.prompt_delta_ids, node.output_ids


def _path_logprobs(
    forward: Forward, path: Sequence[Interaction], known: Mapping[str, object]
) -> dict[str, list[float]]:
    """Return the log-probabilities of the outputs on a path, by call, but for the known ones."""
    ids: list[int] = []
    wanted: list[float | None] = []
    for node in path:
        prompt, output = (part.tolist() for part in _ids(node))
        ids += [*prompt, *output]
        scale = None if node.id in known else sampling_scale(node.gconfig)
        wanted += [None] * len(prompt)
        wanted += [scale] * len(output)
    values = iter(forward.token_logprobs(ids, wanted))
    return {
        node.id: [next(values) for _ in range(len(node.output_ids))]
        for node in path
        if node.id not in known
    }


def sampling_scale(gconfig: GenerationHyperparameters) -> float:
    """Return the temperature by which logits are divided for log-probabilities."""
    return gconfig.temperature if gconfig.temperature >= _GREEDY_BELOW else 1.0


class Progress:
    """Prints to standard error, at most every two seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._last > _QUIET:
            self._last = time.monotonic()
            print(text, file=sys.stderr, flush=True)
