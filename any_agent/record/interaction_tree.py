"""A session's interactions as a tree: a child's messages extend its parent's."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

import numpy as np

from any_agent.record.request_prefix_cache import ENTRY_BYTES, RequestPrefixCache
from any_agent.record.reward_propagation import was_received
from any_agent.types import Continuation, IdArray, Interaction, Message

_MOST = 4
"""Paths: agents of one session may take turns."""


class TokenPathCache:
    """Prompt + output of a few interactions, by id; may be used from any thread."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, IdArray] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def get(self, interaction_id: str) -> IdArray | None:
        return self._ids.get(interaction_id)

    def put(self, interaction_id: str, ids: IdArray, *, instead_of: str | None) -> None:
        """Keep a path, which begins with another one that need not be kept any more."""
        ids.setflags(write=False)
        with self._lock:
            if instead_of is not None:
                self._drop(instead_of)
            self._drop(interaction_id)
            self._ids[interaction_id] = ids
            self.nbytes += ids.nbytes
            while len(self._ids) > _MOST:
                self._drop(next(iter(self._ids)))

    def _drop(self, interaction_id: str) -> None:
        ids = self._ids.pop(interaction_id, None)
        if ids is not None:
            self.nbytes -= ids.nbytes


_MESSAGES = 16
"""Bytes of a key that stand for the messages."""


class InteractionTree:
    """Holds interactions by id, and by the keys of their conversations.

    A node keeps only what it adds to its parent, so a path of N turns costs O(tokens); prompts
    and messages are put together on demand, without recursion.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Interaction] = {}
        self._children: dict[str | None, list[str]] = {None: []}
        self._by_key: dict[bytes, list[Interaction]] = {}
        self._keys: dict[str, bytes | None] = {}
        self._heads: set[bytes] = set()
        self._hot = TokenPathCache()
        self.seen = RequestPrefixCache()

    @classmethod
    def from_interactions(
        cls, interactions: Iterable[Interaction], keys: Iterable[bytes | None] | None = None
    ) -> InteractionTree:
        """A tree of recorded interactions, parents before children; ``keys`` in their order."""
        tree = cls()
        if keys is None:
            for interaction in interactions:
                tree.add(interaction)
        else:
            for interaction, key in zip(interactions, keys, strict=True):
                tree.add(interaction, key)
        return tree

    def add(self, interaction: Interaction, key: bytes | None = None) -> None:
        """Append one interaction; its parent must be there already.

        ``key`` is the running hash over its messages and its output message, by which what
        continues it is recognised; without one nothing does. Its first 16 bytes stand for the
        messages, the others for the system prompt and the tools.

        Raises:
            ValueError: a known id, an unknown parent, or a continuation that contradicts it.
        """
        if interaction.id in self._nodes:
            raise ValueError(f"interaction {interaction.id} is recorded already")
        parent = interaction.parent_id
        if parent is not None and parent not in self._nodes:
            raise ValueError(f"interaction {interaction.id}: its parent {parent} is not recorded")
        if (parent is not None) is not (interaction.continuation is Continuation.EXACT):
            raise ValueError(
                f"interaction {interaction.id}: continuation {interaction.continuation} "
                f"with parent {parent}"
            )
        self._nodes[interaction.id] = interaction
        self._children.setdefault(parent, []).append(interaction.id)
        self._keys[interaction.id] = key
        if key is not None:
            same = self._by_key.setdefault(key[:_MESSAGES], [])
            if same:
                # A request seen before may mean another one of them: their reasoning tells.
                self.seen.forget()
            same.append(interaction)
            self._heads.add(key[_MESSAGES:])

    def that_said(self, key: bytes) -> Sequence[Interaction]:
        """The interactions whose messages, without the system prompt, are those of the key.

        In the order of their creation; their system prompts and tools may be other ones.
        """
        return self._by_key.get(key[:_MESSAGES], ())

    def knows_head(self, key: bytes) -> bool:
        """Whether something was recorded with the key's system prompt and tools."""
        return key[_MESSAGES:] in self._heads

    def path_ids(self, interaction_id: str) -> IdArray:
        """The prompt's and the output's token ids, int32, shape [length]; not to be written to.

        Kept for a while: of the next turn only what it adds has to be put to it.
        """
        node = self._nodes[interaction_id]
        known = self._hot.get(interaction_id)
        if known is not None:
            return known
        parts = [node.output_ids, node.prompt_delta_ids]
        while (parent := node.parent_id) is not None:
            known = self._hot.get(parent)
            if known is not None:
                parts.append(known)
                break
            node = self._nodes[parent]
            parts += (node.output_ids, node.prompt_delta_ids)
        ids = np.concatenate(parts[::-1], dtype=np.int32)
        self._hot.put(interaction_id, ids, instead_of=parent)
        return ids

    @property
    def extra_bytes(self) -> int:
        """What it keeps, about, to be quick about the next calls."""
        return self._hot.nbytes + len(self.seen) * ENTRY_BYTES

    def prompt_ids(self, interaction_id: str) -> IdArray:
        """The prompt's token ids, int32, shape [prompt length]."""
        *past, node = self.path(interaction_id)
        parts = [a for p in past for a in (p.prompt_delta_ids, p.output_ids)]
        return np.concatenate([*parts, node.prompt_delta_ids], dtype=np.int32)

    def messages(self, interaction_id: str) -> list[Message]:
        """The request's messages, without the output message."""
        *past, node = self.path(interaction_id)
        out: list[Message] = []
        for p in past:
            out += [*p.message_delta, p.output_message]
        return out + node.message_delta

    def path(self, interaction_id: str) -> list[Interaction]:
        """From the root to the interaction, both included."""
        out = [self._nodes[interaction_id]]
        while (parent := out[-1].parent_id) is not None:
            out.append(self._nodes[parent])
        return out[::-1]

    def children(self, interaction_id: str | None) -> list[Interaction]:
        """In the order of their creation; of None: the roots."""
        return [self._nodes[i] for i in self._children.get(interaction_id, ())]

    def leaves(self) -> list[Interaction]:
        """Those without children, in the order of their creation."""
        return [node for node in self if not self._children.get(node.id)]

    def last(self) -> Interaction:
        """The latest that reached the agent, which a reward without an id means; else the latest.

        Raises:
            LookupError: the tree is empty.
        """
        newest_first = list(reversed(self._nodes.values()))
        if not newest_first:
            raise LookupError("there is no interaction")
        return next((n for n in newest_first if was_received(n)), newest_first[0])

    def key(self, interaction_id: str) -> bytes | None:
        """The key it was added with, from which a child's keys go on."""
        return self._keys[interaction_id]

    def get(self, interaction_id: str) -> Interaction | None:
        return self._nodes.get(interaction_id)

    def __getitem__(self, interaction_id: str) -> Interaction:
        return self._nodes[interaction_id]

    def __contains__(self, interaction_id: object) -> bool:
        return interaction_id in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Interaction]:
        """In the order of their creation: parents before children."""
        return iter(self._nodes.values())


FROZEN_MODEL = "frozen_model"
"""Why none of them is trained on."""
_PREFIX = "frozen-"
"""What their ids begin with, and no others."""


def frozen_id() -> str:
    """A new one's."""
    return f"{_PREFIX}{secrets.token_hex(16)}"


def is_frozen(interaction: Interaction) -> bool:
    """Whether it is one of them: it has no token ids, and no parent."""
    return interaction.untrainable_reason == FROZEN_MODEL
