"""Grammars that an output must keep to: JSON schemas, regular expressions and structural tags, by
llguidance."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from any_agent.engine.embedded.grammar_tokens import tokens_of
from any_agent.engine.embedded.structural_tags import lark_of
from any_agent.errors import AnyAgentError, EngineMismatch, InvalidRequest, UnsupportedParameter

if TYPE_CHECKING:
    from any_agent.engine.embedded.model_loader import LoadedModel

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""What llguidance says of a token that it did not allow."""


class GrammarCompiler:
    """Compiles grammars for one model's tokens. Slow (a second for a large vocabulary the first
    time, milliseconds later) and safe in any thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._tokens: Any = None

    @property
    def available(self) -> bool:
        """Whether the tokenizer is one whose tokens' bytes are known."""
        return getattr(self._loaded.tokenizer, "backend_tokenizer", None) is not None

    def compile(self, grammar: str) -> GrammarState:
        """From :class:`~any_agent.types.GenerationHyperparameters`' form.

        Raises InvalidRequest (not a grammar, or too large a one), UnsupportedParameter.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._of_model(), self.source(grammar), log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"not a grammar: {_said(matcher)}", param="grammar")
        return GrammarState(matcher, self._loaded.eos_ids)

    def source(self, grammar: str) -> str:
        """In llguidance's own form, which says nothing yet of what it costs; else as `compile`."""
        from llguidance import LLMatcher

        if not self.available:
            raise UnsupportedParameter("this model's tokenizer knows no grammars", param="grammar")
        try:
            given = orjson.loads(grammar)
            if "structural_tag" in given:
                return str(LLMatcher.grammar_from_lark(lark_of(given["structural_tag"])))
            if "regex" in given:
                return str(LLMatcher.grammar_from_regex(given["regex"]))
            # A schema's references to other documents are never fetched.
            schema = {"type": "object"} if "json_object" in given else given["json_schema"]
            return str(LLMatcher.grammar_from_json_schema(schema))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"not a grammar: {error}", param="grammar") from None

    def _of_model(self) -> Any:
        with self._lock:
            if self._tokens is None:
                self._tokens = tokens_of(self._loaded)
            return self._tokens


class GrammarState:
    """Where in its grammar one output is."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._mistake: EngineMismatch | None = None
        self.ended = False
        """The output is complete, and its end-of-text has come."""

    @property
    def error(self) -> AnyAgentError | None:
        """Why it has lost its way, so that no end that comes now is one.

        InvalidRequest for a grammar that is too complex to follow; EngineMismatch for an output
        that left it, which is a mistake of this engine.
        """
        if not self._matcher.is_error():
            return self._mistake
        said = _said(self._matcher)
        if _NOT_ALLOWED in said:
            return EngineMismatch(f"the output left its grammar: {said}")
        return InvalidRequest(
            f"the grammar is too complex to follow, make it simpler: {said}", param="grammar"
        )

    def push(self, token: int) -> None:
        if token not in self._eos_ids:
            self._matcher.consume_token(token)
            return
        self.ended = True
        if not self._matcher.is_error() and not self._matcher.is_accepting():
            self._mistake = EngineMismatch("the output ended where its grammar goes on")

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """Per id of the vocabulary, rounded up to 32, whether it may not come next.

        Where the output is complete, only the model's ends of text may; so too after an error,
        which must be looked at before such an end is believed.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        forbidden: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little") == 0
        return forbidden


def _said(matcher: Any) -> str:
    """The error without the dump of the matcher's state."""
    return str(matcher.get_error()).partition("\n<state>")[0][:500]
