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

_MOST = 4  # number of cached paths: several agents of one session may take turns


class TokenPathCache:
    """Token ids of the paths that are likely to be continued next, by id; thread-safe."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, IdArray] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def get(self, interaction_id: str) -> IdArray | None:
        return self._ids.get(interaction_id)

    def put(self, interaction_id: str, ids: IdArray, *, instead_of: str | None) -> None:
        """Store a path in place of the shorter one that it extends."""
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


_MESSAGES = 16  # number of bytes of a key that identify the messages


class InteractionTree:
    """Interactions by id, and by the keys of their conversations.

    A node stores only what it adds to its parent, so a path of N turns costs O(tokens); prompts
    and messages are assembled on demand, without recursion.
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
    def from_interactions(cls, interactions: Iterable[Interaction]) -> InteractionTree:
        """Return a tree of interactions without keys, parents before children."""
        tree = cls()
        for interaction in interactions:
            tree.add(interaction)
        return tree

    def add(self, interaction: Interaction, key: bytes | None = None) -> None:
        """Append one interaction; its parent must be there already.

        ``key`` is the running hash over its messages and its output message, which identifies a
        request that continues it; without a key no request does. Its first 16 bytes identify the
        messages, the others the system prompt and the tools. Raises ValueError for a known id, an
        unknown parent, or a continuation that contradicts the parent.
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
                # A known request may continue another one of them: only the reasoning decides.
                self.seen.forget()
            same.append(interaction)
            self._heads.add(key[_MESSAGES:])

    def with_messages(self, key: bytes) -> Sequence[Interaction]:
        """Return the interactions with the key's messages, in the order of their creation.

        Their system prompts and tools may differ from the key's.
        """
        return self._by_key.get(key[:_MESSAGES], ())

    def knows_head(self, key: bytes) -> bool:
        """Return whether an interaction has the key's system prompt and tools."""
        return key[_MESSAGES:] in self._heads

    def path_ids(self, interaction_id: str) -> IdArray:
        """Return the token ids of prompt and output, int32, shape [length], read-only.

        They are cached, so that the next turn only appends what it adds.
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
        """The approximate size of the caches that speed up the next calls."""
        return self._hot.nbytes + len(self.seen) * ENTRY_BYTES

    def prompt_ids(self, interaction_id: str) -> IdArray:
        """Return the prompt's token ids, int32, shape [prompt length]."""
        *past, node = self.path(interaction_id)
        parts = [a for p in past for a in (p.prompt_delta_ids, p.output_ids)]
        return np.concatenate([*parts, node.prompt_delta_ids], dtype=np.int32)

    def messages(self, interaction_id: str) -> list[Message]:
        """Return the request's messages, without the output message."""
        *past, node = self.path(interaction_id)
        out: list[Message] = []
        for p in past:
            out += [*p.message_delta, p.output_message]
        return out + node.message_delta

    def path(self, interaction_id: str) -> list[Interaction]:
        """Return the interactions from the root to this one, both included."""
        out = [self._nodes[interaction_id]]
        while (parent := out[-1].parent_id) is not None:
            out.append(self._nodes[parent])
        return out[::-1]

    def children(self, interaction_id: str | None) -> list[Interaction]:
        """Return the children in the order of their creation; for None the roots."""
        return [self._nodes[i] for i in self._children.get(interaction_id, ())]

    def last(self) -> Interaction:
        """Return the latest interaction that reached the agent, else the latest of all.

        A reward without an id is for this one. Raises LookupError if the tree is empty.
        """
        newest_first = list(reversed(self._nodes.values()))
        if not newest_first:
            raise LookupError("there is no interaction")
        return next((n for n in newest_first if was_received(n)), newest_first[0])

    def key(self, interaction_id: str) -> bytes | None:
        """Return the key with which the interaction was added."""
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
        """Iterate in the order of creation: parents before children."""
        return iter(self._nodes.values())


FROZEN_MODEL = "frozen_model"  # the reason why no call of a frozen model is trained on
_PREFIX = "frozen-"  # the prefix of the ids of these calls alone


def frozen_id() -> str:
    """Return a new id for a call of a frozen model."""
    return f"{_PREFIX}{secrets.token_hex(16)}"


def is_frozen(interaction: Interaction) -> bool:
    """Return whether it is a call of a frozen model, which has no token ids and no parent."""
    return interaction.untrainable_reason == FROZEN_MODEL
