"""Grammars of outputs, by llguidance: JSON schemas, regular expressions and structural tags."""

from __future__ import annotations

import json
import re
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson

from any_agent.errors import AnyAgentError, EngineMismatch, InvalidRequest, UnsupportedParameter

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from any_agent.engine.embedded.model_loader import LoadedModel

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that it did not allow."""


class GrammarCompiler:
    """Compiles grammars for one model's tokens; safe in any thread.

    The first one takes a second for a large vocabulary, later ones milliseconds.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._lock = threading.Lock()
        self._tokens: Any = None

    @property
    def available(self) -> bool:
        """True if the bytes of the tokenizer's tokens are known."""
        return getattr(self._loaded.tokenizer, "backend_tokenizer", None) is not None

    def compile(self, grammar: str) -> GrammarState:
        """Compile a grammar in the form of :class:`~any_agent.types.GenerationHyperparameters`.

        Raises InvalidRequest (not a grammar, or too large a one), UnsupportedParameter.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._of_model(), self.source(grammar), log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"not a grammar: {_error_of(matcher)}", param="grammar")
        return GrammarState(matcher, self._loaded.eos_ids)

    def source(self, grammar: str) -> str:
        """Return the grammar in llguidance's own form, at an unknown cost; raises as `compile`."""
        from llguidance import LLMatcher

        if not self.available:
            raise UnsupportedParameter(
                "this model's tokenizer does not support grammars", param="grammar"
            )
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
    """The position of one output in its grammar."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._mistake: EngineMismatch | None = None
        self.ended = False
        """True once the output is complete and its end-of-text has come."""

    @property
    def error(self) -> AnyAgentError | None:
        """The error after which no end of the output counts.

        It is InvalidRequest for a grammar that is too complex to follow, and EngineMismatch for an
        output that left its grammar, which is a fault of this engine.
        """
        if not self._matcher.is_error():
            return self._mistake
        message = _error_of(self._matcher)
        if _NOT_ALLOWED in message:
            return EngineMismatch(f"the output left its grammar: {message}")
        return InvalidRequest(
            f"the grammar is too complex to follow, make it simpler: {message}", param="grammar"
        )

    def push(self, token: int) -> None:
        if token not in self._eos_ids:
            self._matcher.consume_token(token)
            return
        self.ended = True
        if not self._matcher.is_error() and not self._matcher.is_accepting():
            self._mistake = EngineMismatch("the output ended where its grammar goes on")

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """Return True for each id, their number rounded up to 32, that may not come next.

        If the output is complete, only the model's end-of-text tokens may. The same holds after an
        error, so check :attr:`error` before accepting such an end.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        forbidden: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little") == 0
        return forbidden


def _error_of(matcher: Any) -> str:
    """Return the matcher's error without the dump of its state."""
    return str(matcher.get_error()).partition("\n<state>")[0][:500]


def tokens_of(loaded: LoadedModel) -> LLTokenizer:
    """Return a fast tokenizer's tokens for llguidance; a large vocabulary takes a second or two.

    Where a grammar allows one text alone, llguidance takes the tokens that the tokenizer makes of
    it, and a tokenizer reads `<think>`, say, as one special token, which is no text. So here an
    answer that spells a token's name is written in ordinary tokens.
    """
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    eos = sorted(loaded.eos_ids)
    plain = from_tokenizer(loaded.tokenizer, n_vocab=loaded.vocab_size, eos_token=eos, slices=[])
    spelled = TokenizerWrapper(_Spelled(plain, _named(loaded)))
    return LLTokenizer(spelled, n_vocab=loaded.vocab_size, eos_token=eos)


def _named(loaded: LoadedModel) -> dict[int, bytes]:
    """Return the added tokens, special or not, as some families' markers; no runs of spaces."""
    added = loaded.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {
        token: one.content.encode()
        for token, one in added.items()
        if token < loaded.vocab_size
        and one.content
        and (one.special or (len(one.content) > 1 and not one.content.isspace()))
    }


class _Spelled:
    """The tokens' bytes and a function from text to ids, in the form of llguidance's wrapper."""

    bos_token_id = None

    def __init__(self, plain: LLTokenizer, named: dict[int, bytes]) -> None:
        ids = range(plain.vocab_size)
        self.eos_token_id = plain.eos_token
        self.tokens = [named.get(i) or plain.decode_bytes([i]) for i in ids]
        self.special_token_ids = [i for i in ids if i in named or plain.is_special_token(i)]
        self._plain = plain
        # A look-ahead, so that overlapping names are all found. Without names it finds nothing.
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


def lark_of(tag: Any) -> str:
    """Convert a structural tag (`{"type": "structural_tag", "format": ...}`) to llguidance's Lark.

    Only the parts that this service sends are supported; ValueError, KeyError or TypeError for any
    other.
    """
    rules: list[str] = []
    try:
        start = _part(tag["format"], rules)
    except RecursionError:
        raise ValueError("the structural tag is nested too deep") from None
    return "\n".join([f"start: {start}", *rules])


def _part(part: Any, rules: list[str]) -> str:
    match part:
        case {"type": "const_string", "value": str(text)}:
            return json.dumps(text, ensure_ascii=False)
        case {"type": "token", "token": int(token)}:
            return f"<[{token}]>"
        case {"type": "json_schema", "json_schema": schema}:
            return f"%json {json.dumps(schema)}"
        case {"type": "regex", "pattern": str(pattern)}:
            return _rule(f": {_regex(pattern)}", rules)
        case {"type": "sequence", "elements": [*parts]}:
            return _rule(": " + " ".join(_part(each, rules) for each in parts), rules)
        case {"type": "or", "elements": [*parts]}:
            return _rule(": " + " | ".join(_part(each, rules) for each in parts), rules)
        case {"type": "optional", "content": content}:
            return _rule(f": ({_part(content, rules)})?", rules)
        case {"type": "star", "content": content}:
            return _rule(f": ({_part(content, rules)})*", rules)
        case {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}:
            return _rule(f": {_edge(begin, rules)} {_until(end, rules)}", rules)
    raise ValueError(f"a structural tag's part {str(part)[:80]} is not supported")


def _rule(body: str, rules: list[str]) -> str:
    """Add a rule, which keeps its body together, and return its name."""
    name = f"part_{len(rules)}"
    rules.append(name + body)
    return name


def _edge(edge: Any, rules: list[str]) -> str:
    return json.dumps(edge, ensure_ascii=False) if isinstance(edge, str) else _part(edge, rules)


def _until(end: Any, rules: list[str]) -> str:
    """Return a rule for any text up to and with the first ``end``."""
    if isinstance(end, str):
        return _rule(f"[suffix={json.dumps(end)}]: /(?s:.*)/", rules)
    return _rule(": /(?s:.*)/", rules) + " " + _part(end, rules)


def _regex(pattern: str) -> str:
    """Write a pattern between slashes, with those inside it escaped."""
    out, escaped = [], False
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "/" + "".join(out).replace("\n", "\\n") + "/"
