"""The propagation of rewards through a session's tree.

``r(parent) = own(parent) + discount * mean(r(children))``; the session's final reward is added to
every leaf. Two kinds of interactions are discarded, because the agent made no use of them:

- among several answers to one request (siblings with the same new messages, tools, forced call and
  role: the choices of one ``n > 1`` call, or a retry beside the call that it repeats) those that
  were not continued while another one was;
- answers that never reached the agent (the client left, or the call was aborted) and were neither
  continued nor rewarded by name.

The mean of a parent is taken over its other children; a parent without others is a leaf.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping

from any_agent.types import Interaction

_NOT_RECEIVED = {"undelivered", "aborted"}


def was_received(interaction: Interaction) -> bool:
    """Return whether the agent got the whole answer."""
    return (
        interaction.finish_reason != "abort" and interaction.untrainable_reason not in _NOT_RECEIVED
    )


def discarded(interactions: Iterable[Interaction]) -> set[str]:
    """Return the ids of the discarded interactions; ``interactions``: parents before children."""
    nodes = list(interactions)
    continued = {n.parent_id for n in nodes}
    out: set[str] = set()
    for answers in _answers_to_one_request(nodes, continued):
        out |= {n.id for n in answers if n.id not in continued}
    going_on: set[str | None] = set()
    for n in reversed(nodes):
        if n.id not in going_on and n.reward is None and not was_received(n):
            out.add(n.id)
        if n.id not in out:
            going_on.add(n.parent_id)
    return out


def propagate_rewards(
    interactions: Iterable[Interaction],
    *,
    discount: float = 1.0,
    final_reward: float | None = None,
) -> dict[str, float]:
    """Return r of every interaction, by id; parents before children, as recorded.

    A missing reward counts as 0. A discarded interaction keeps its own reward.
    """
    nodes = list(interactions)
    gone = discarded(nodes)
    below: defaultdict[str | None, list[float]] = defaultdict(list)
    r: dict[str, float] = {}
    for n in reversed(nodes):
        own = n.reward or 0.0
        if n.id in gone:
            r[n.id] = own
            continue
        children = below.get(n.id)
        if children:
            r[n.id] = own + discount * (sum(children) / len(children))
        else:
            r[n.id] = own + (final_reward or 0.0)
        below[n.parent_id].append(r[n.id])
    return {n.id: r[n.id] for n in nodes}


def session_score(
    interactions: Iterable[Interaction], rewards: Mapping[str, float]
) -> float | None:
    """Return the mean of the propagated rewards of the calls that training counts.

    None if it counts none: all are untrainable or discarded.
    """
    nodes = list(interactions)
    gone = discarded(nodes)
    counted = [rewards[n.id] for n in nodes if n.trainable and n.id not in gone]
    return math.fsum(counted) / len(counted) if counted else None


def _answers_to_one_request(
    nodes: Iterable[Interaction], continued: Container[str | None]
) -> list[list[Interaction]]:
    """Return the answers to each request of which some were continued and others were not."""
    found = [list(nodes)]
    # The cheap parts first: a session may have thousands of long requests, each with its tools.
    for part in (_parent, _texts, _request):
        found = [same for each in found for same in _grouped(each, part) if _mixed(same, continued)]
    return found


def _grouped(
    nodes: Iterable[Interaction], part: Callable[[Interaction], Hashable]
) -> Iterable[list[Interaction]]:
    out: defaultdict[Hashable, list[Interaction]] = defaultdict(list)
    for n in nodes:
        out[part(n)].append(n)
    return out.values()


def _mixed(nodes: Iterable[Interaction], continued: Container[str | None]) -> bool:
    return len({n.id in continued for n in nodes}) == 2


def _parent(n: Interaction) -> Hashable:
    return n.parent_id


def _texts(n: Interaction) -> Hashable:
    """Return what equal requests have in common, and most others have not."""
    contents = [message.get("content") for message in n.message_delta]
    return tuple(each if isinstance(each, str) else None for each in contents)


def _request(n: Interaction) -> Hashable:
    # Without its texts a request is identified by its ids.
    messages = json.dumps(n.message_delta, sort_keys=True) if n.message_delta else ""
    tools = json.dumps(n.tools, sort_keys=True)
    forced = n.prompt_delta_ids[len(n.prompt_delta_ids) - n.request.get("forced", 0) :]
    return messages or n.prompt_delta_ids.tobytes(), tools, forced.tobytes(), n.role
