"""The shapes of Qwen3's dense models, from which memory and work follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of plain layers: grouped-query attention with normalised queries and keys, and a
    gated feed-forward part."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 128
    vocab: int = 151_936
    tied: bool = False
    """True if the output head is the embedding."""
    positions: int = 40_960

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one layer: projections, feed-forward part, norms."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate + 2 * (self.hidden + self.head_dim)

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the embedding, and of the head if it is another matrix."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.embedding_parameters + self.hidden

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of one token's keys and values in bfloat16, in all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, tokens: int, pairs: float, heads: int) -> float:
        """Return the FLOPs of ``tokens``, ``heads`` of them through the head.

        Two for each weight, and two products for each of the ``pairs`` of a query and a key that it
        sees. Norms and the like are left out, as is usual.
        """
        weights = self.layers * (self.layer_parameters - 2 * (self.hidden + self.head_dim))
        seen = 4.0 * self.layers * self.heads * self.head_dim * pairs
        return 2.0 * tokens * weights + seen + heads * 2.0 * self.vocab * self.hidden

    def config(self) -> Any:
        """Return transformers' configuration of such a model."""
        from transformers import Qwen3Config

        return Qwen3Config(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.positions,
            tie_word_embeddings=self.tied,
            # No output ends before its last token.
            eos_token_id=None,
            pad_token_id=None,
            bos_token_id=None,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 2, 64, 4, 2, 128, head_dim=16, vocab=512, tied=True, positions=2048),
        Shape("0.6B", 28, 1024, 16, 8, 3072, tied=True),
        Shape("4B", 36, 2560, 32, 8, 9728, tied=True),
        Shape("8B", 36, 4096, 32, 8, 12_288),
        Shape("32B", 64, 5120, 64, 8, 25_600),
    )
}
"""Qwen3's shapes by their names, and one for machines without a GPU."""
