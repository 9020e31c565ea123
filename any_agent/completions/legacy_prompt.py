"""The prompt of a legacy completion: a recorded prompt + output continued exactly, or a new root.

The interaction of such a request keeps two digests: of the text of its prompt + output, and of
their ids. A prompt that begins with one of them continues it: the recorded ids stay as they were
sampled, and only what follows is encoded. One pass over the prompt finds the parent, whatever was
recorded.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from any_agent.chat import ChatFormat
from any_agent.completions.params.call import TextInput
from any_agent.completions.prompt import ParentMatch, Prompt
from any_agent.errors import ContextLengthExceeded, InvalidRequest
from any_agent.record import InteractionTree, was_received
from any_agent.types import BranchReason, Continuation, IdArray, Interaction, id_array

_TAIL = 8  # ids on both sides of a continuation that are decoded together to check their text


def find_text_past(
    given: TextInput, tree: InteractionTree | None, chat: ChatFormat, context_length: int
) -> ParentMatch:
    """Find the interaction that the prompt continues, at little cost.

    ContextLengthExceeded for a prompt that cannot fit, however it is encoded; InvalidRequest for an
    id that is not one of the model's.
    """
    _require_plausible(given, chat, context_length)
    data, is_text = _bytes_of(given), isinstance(given, str)
    found = _longest_past(data, "text" if is_text else "ids", tree) if tree is not None else None
    parent, size = found if found is not None else (None, 0)
    return ParentMatch(b"", parent, size, new_characters=len(data) - size)


def text_prompt_of(
    given: TextInput, past: ParentMatch, tree: InteractionTree | None, chat: ChatFormat
) -> Prompt:
    """Return the recorded ids and the ids of what follows, else the whole prompt as a root.

    InvalidRequest for a text that cannot be encoded.
    """
    if past.parent is None or tree is None:
        reason: BranchReason | None = "new_conversation" if tree is not None and len(tree) else None
        if isinstance(given, str):
            ids = _encode(chat, given, root=True)
            return Prompt(ids, branch_reason=reason, added=given)
        return Prompt(id_array(given), branch_reason=reason, added=chat.decode(given))
    before = tree.path_ids(past.parent.id)
    if isinstance(given, str):
        added = _bytes_of(given)[past.covered :].decode(errors="surrogatepass")
        following = _following_ids(before, added, chat)
        if following is None:
            ids, how = _encode(chat, given, root=True), Continuation.BRANCH
            reason = "template_declines"
            return Prompt(ids, continuation=how, branch_reason=reason, added=given)
        rest = following
    else:
        rest = id_array(given[len(before) :])
        added = chat.decode(rest.tolist())
    ids = np.concatenate([before, rest], dtype=np.int32)
    exact = Continuation.EXACT
    return Prompt(ids, len(before), past.parent.id, continuation=exact, added=added)


def _following_ids(before: IdArray, added: str, chat: ChatFormat) -> IdArray | None:
    """Return the ids of the added text; None if they decode to another text behind these ids."""
    end = int(before[-1])
    if end in chat.stop_token_ids:
        # Texts do not show this id, so an agent that writes its own turns adds it once more.
        added = added.removeprefix(chat.token_text(end))
    ids = _encode(chat, added, root=False)
    tail, first = before[-_TAIL:].tolist(), ids[:_TAIL].tolist()
    says = chat.decode(tail + first).removeprefix(chat.decode(tail))
    # Some tokenizers begin every text with a space.
    spaced = says == f" {chat.decode(first)}" and not added.startswith(" ")
    return None if spaced else ids


def digests(given: TextInput, ids: IdArray, output: str) -> dict[str, Any]:
    """Return an interaction's digests; ``ids``: its prompt's and output's, ``output``: its text."""
    plain = np.ascontiguousarray(ids, dtype="<i4").tobytes()
    out: dict[str, Any] = {"ids": [len(plain), _digest(plain)]}
    if isinstance(given, str):
        text = _bytes_of(given + output)
        out["text"] = [len(text), _digest(text)]
    return out


def text_key(kept: dict[str, Any]) -> bytes:
    """Return the interaction's key, which no chat request's chain ever has."""
    return hashlib.blake2b(kept["ids"][1].encode(), digest_size=16, key=b"text").digest()


def _longest_past(data: bytes, kind: str, tree: InteractionTree) -> tuple[Interaction, int] | None:
    """Return the recorded interaction that the prompt begins with, and its number of bytes."""
    known: dict[tuple[int, str], list[Interaction]] = {}
    for interaction in tree:
        kept = interaction.request.get("text", {}).get(kind)
        # The agent lacks the end of an answer that was cut off.
        if kept is None or interaction.finish_reason == "abort" or kept[0] > len(data):
            continue
        known.setdefault((kept[0], kept[1]), []).append(interaction)
    running, at = hashlib.blake2b(digest_size=16), 0
    found: tuple[Interaction, int] | None = None
    for size in sorted({size for size, _ in known}):
        running.update(data[at:size])
        at = size
        same = known.get((size, running.copy().hexdigest()))
        if same:
            received = (i for i in reversed(same) if was_received(i))
            found = next(received, same[-1]), size
    return found


def _require_plausible(given: TextInput, chat: ChatFormat, context_length: int) -> None:
    most = context_length * (chat.longest_token if isinstance(given, str) else 1)
    if len(given) > most:
        what = "characters" if isinstance(given, str) else "tokens"
        raise ContextLengthExceeded(
            f"this model's maximum context length is {context_length} tokens, but the prompt is "
            f"{len(given)} {what} long; shorten it",
            param="prompt",
        )
    if not isinstance(given, str):
        wrong = next((i for i in given if not 0 <= i < chat.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"prompt has the token id {wrong}; this model's are 0 to {chat.vocab_size - 1}",
                param="prompt",
            )


def _encode(chat: ChatFormat, text: str, *, root: bool) -> IdArray:
    """Return a text's ids; ``root``: with the tokenizer's beginning-of-text tokens."""
    try:
        return id_array(chat.encode(text, special=root))
    except Exception as error:
        raise InvalidRequest(
            f"the prompt cannot be encoded ({type(error).__name__})", param="prompt"
        ) from error


def _bytes_of(given: TextInput) -> bytes:
    if isinstance(given, str):
        return given.encode(errors="surrogatepass")
    return np.asarray(given, dtype="<i4").tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
