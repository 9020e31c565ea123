"""A model's tokens as llguidance is to see them: none that means something stands for its name.

Where a grammar leaves one text alone, llguidance takes the tokens that the tokenizer makes of it;
and a tokenizer reads `<think>`, say, as the one token, which is no text. An answer that spells a
token's name is written in ordinary tokens instead.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from any_agent.engine.embedded.model_loader import LoadedModel


def tokens_of(loaded: LoadedModel) -> LLTokenizer:
    """Of a fast tokenizer. Takes a second or two for a large vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    eos = sorted(loaded.eos_ids)
    plain = from_tokenizer(loaded.tokenizer, n_vocab=loaded.vocab_size, eos_token=eos, slices=[])
    spelled = TokenizerWrapper(_Spelled(plain, _named(loaded)))
    return LLTokenizer(spelled, n_vocab=loaded.vocab_size, eos_token=eos)


def _named(loaded: LoadedModel) -> dict[int, bytes]:
    """The added tokens, special or not, as some families' markers are: but for runs of spaces."""
    added = loaded.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {
        token: one.content.encode()
        for token, one in added.items()
        if token < loaded.vocab_size
        and one.content
        and (one.special or (len(one.content) > 1 and not one.content.isspace()))
    }


class _Spelled:
    """What llguidance's wrapper wants: the tokens' bytes, and a function from text to ids."""

    bos_token_id = None

    def __init__(self, plain: LLTokenizer, named: dict[int, bytes]) -> None:
        ids = range(plain.vocab_size)
        self.eos_token_id = plain.eos_token
        self.tokens = [named.get(i) or plain.decode_bytes([i]) for i in ids]
        self.special_token_ids = [i for i in ids if i in named or plain.is_special_token(i)]
        self._plain = plain
        # Looks ahead, so that names that overlap are all found. Without names it finds nothing.
        names = b"|".join(map(re.escape, named.values())) or b"(?!)"
        self._name = re.compile(b"(?=" + names + b")")

    def __call__(self, text: Any) -> list[int]:
        text = text.encode() if isinstance(text, str) else text
        # No piece has a whole name: each name is cut after its first byte.
        cuts = [found.start() + 1 for found in self._name.finditer(text)]
        out: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start < end:
                out += self._plain.tokenize_bytes(text[start:end])
        return out
