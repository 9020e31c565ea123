"""Reading answers: what they add, and what cannot be true."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from any_agent.engine.sglang.requests import capabilities_of, generate_body
from any_agent.engine.sglang.responses import ChunkReader, events
from any_agent.errors import EngineMismatch, EngineUnavailable, InvalidRequest
from tests.support.engine.sglang import request
from tests.support.errors import fails_with

EVERYTHING: dict[str, Any] = {
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": ((7, 1.5), (8, -100.0)),
}


def meta(total: int, fresh: int, **changes: Any) -> dict[str, Any]:
    ids = list(range(30 + total - fresh, 30 + total))
    told = {
        "completion_tokens": total,
        "prompt_tokens": 3,
        "finish_reason": None,
        "weight_version": "4",
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
    }
    return {"output_ids": ids, "meta_info": told | changes}


def test_parameters_are_sent_under_sglangs_names() -> None:
    ask = replace(request(**EVERYTHING, seed=3), top_logprobs=4, cache_salt="s")
    body = orjson.loads(generate_body(ask, stream=True))
    sampling = body["sampling_params"]
    assert {k: sampling[k] for k in EVERYTHING} == EVERYTHING | {
        "logit_bias": {"7": 1.5, "8": -100.0}
    }
    assert (sampling["sampling_seed"], body["top_logprobs_num"], body["cache_salt"]) == (3, 4, "s")
    assert body["stream"] is True


def test_an_answer_must_name_the_adapter_that_was_asked_for() -> None:
    ask = replace(request(), adapter="mine")
    assert orjson.loads(generate_body(ask, stream=True))["lora_path"] == "mine"
    assert "lora_path" not in orjson.loads(generate_body(request(), stream=True))
    for told in ({}, {"adapter": "other@12"}, {"adapter": "min@12"}, {"adapter": 3}):
        with fails_with(EngineMismatch, "'mine'"):
            ChunkReader(ask).read(meta(1, 1, **told))
    with fails_with(EngineMismatch, "the model alone"):
        ChunkReader(request()).read(meta(1, 1, adapter="mine@12"))
    chunk = ChunkReader(ask).read(meta(1, 1, adapter="mine@12"))
    assert (chunk.adapter, chunk.output_ids) == ("mine@12", [30])
    assert ChunkReader(request()).read(meta(1, 1)).adapter is None


@pytest.mark.parametrize(
    "grammar, name, text",
    [
        ('{"json_schema": {"type": "array"}}', "json_schema", {"type": "array"}),
        ('{"json_object": true}', "json_schema", {"type": "object"}),
        ('{"regex": "a+"}', "regex", "a+"),
    ],
)
def test_grammars_are_sent_in_sglangs_form(grammar: str, name: str, text: Any) -> None:
    sampling = orjson.loads(generate_body(request(grammar=grammar), stream=False))[
        "sampling_params"
    ]
    (found,) = {"json_schema", "regex"} & sampling.keys()
    assert found == name
    assert (orjson.loads(sampling[name]) if name == "json_schema" else sampling[name]) == text


def test_cumulative_and_incremental_events_read_the_same() -> None:
    for cumulative in (True, False):
        reader = ChunkReader(request())
        chunks = [reader.read(meta(n, n if cumulative else k)) for n, k in ((1, 1), (3, 2), (4, 1))]
        assert [c.output_ids for c in chunks] == [[30], [31, 32], [33]]
        assert [c.versions for c in chunks] == [[4], [4, 4], [4]]
        assert all(c.top_logprobs is None for c in chunks)


def test_likeliest_tokens_are_read_without_impossible_ones() -> None:
    asked = replace(request(), top_logprobs=2)
    top = [[[-0.1, 5, None], [None, 6, None]], [[-0.5, 7, None], [-0.6, 8, None]]]
    chunk = ChunkReader(asked).read(meta(2, 2, output_top_logprobs=top))
    assert chunk.top_logprobs == [[(5, -0.1)], [(7, -0.5), (8, -0.6)]]
    assert ChunkReader(request()).read(meta(2, 2)).top_logprobs is None
    with fails_with(EngineMismatch, "likeliest"):
        ChunkReader(asked).read(meta(2, 2, output_top_logprobs=[[]]))
    # Rounding above zero is borne.
    told = {"output_token_logprobs": [[1.2e-7, 30, None]]}
    assert ChunkReader(request()).read(meta(1, 1, **told)).logprobs == [1.2e-7]


def test_an_engine_may_say_which_tokens_its_grammar_decided() -> None:
    for cumulative in (True, False):
        reader = ChunkReader(request())
        reader.read(meta(1, 1, output_token_bound=[True]))
        seen = [True] if cumulative else []
        told = meta(3, 3 if cumulative else 2, output_token_bound=[*seen, False, True])
        assert reader.read(told).bound == [False, True]
    assert ChunkReader(request()).read(meta(1, 1)).bound is None, "SGLang does not tell"


def bad_id(token: int) -> dict[str, Any]:
    return {"output_ids": [token], "output_token_logprobs": [[-0.5, token, None]]}


UNREADABLE = (EngineUnavailable, "cannot be read")
WRONG: list[tuple[dict[str, Any], tuple[type[Exception], str]]] = [
    *(
        ({"prompt_tokens": n}, (EngineMismatch, f"{n or 0} prompt tokens instead of 3"))
        for n in (2, None)
    ),
    *(({"completion_tokens": n}, (EngineMismatch, f"{n} tokens of at most 10")) for n in (11, 0)),
    ({"output_token_logprobs": [[-0.5, 99, None]]}, (EngineMismatch, "disagree")),
    ({"output_token_logprobs": []}, (EngineMismatch, "disagree")),
    ({"output_token_logprobs": [[0.01, 31, None]]}, (EngineMismatch, "0.01")),
    ({"weight_version": "3"}, (EngineMismatch, "from 4 to 3")),
    ({"weight_versions": [{"version": "4", "start": 0, "end": 1}]}, (EngineMismatch, "versions")),
    # Ids that the model, which has 100, does not have.
    *((bad_id(token), (EngineMismatch, f"sampled {token}, ")) for token in (-1, 100, 2**63)),
    ({"completion_tokens": None}, UNREADABLE),
    ({"output_token_logprobs": [[None, 31, None]]}, UNREADABLE),
    ({"output_token_logprobs": 7}, UNREADABLE),
    ({"weight_version": "new"}, UNREADABLE),
    ({"finish_reason": {"type": "boredom"}}, UNREADABLE),
]


@pytest.mark.parametrize(("changes", "error"), WRONG, ids=str)
def test_an_answer_that_cannot_be_true_or_read_is_refused(
    changes: dict[str, Any], error: tuple[type[Exception], str]
) -> None:
    reader = ChunkReader(request(), 100)
    reader.read(meta(1, 1))
    event = meta(2, 1, **changes)
    event["output_ids"] = changes.get("output_ids", event["output_ids"])
    kind, says = error
    facts = {"status": 500, "code": "engine_mismatch"} if kind is EngineMismatch else {}
    with fails_with(kind, says, **facts):
        reader.read(event)


def test_ids_that_no_model_has_and_unclear_marks_of_a_grammars_tokens_are_refused() -> None:
    for token in (-1, 2**63):
        told = {**meta(1, 1, **bad_id(token)), "output_ids": [token]}
        with fails_with(EngineMismatch, f"sampled {token}, "):
            ChunkReader(request()).read(told)
    for bound in ([True], [True, 1], [True, None], None, "ab"):
        with pytest.raises((EngineUnavailable, ValueError)):
            ChunkReader(request()).read(meta(2, 2, output_token_bound=bound))


def test_an_answer_aborted_in_sglangs_queue_is_read_whole() -> None:
    """It tells nothing of the prompt and repeats the last id, but has all log-probabilities."""
    reader = ChunkReader(request())
    reader.read(meta(2, 2))
    event = meta(3, 3, finish_reason={"type": "abort", "message": "x"}, prompt_tokens=None)
    event["output_ids"] = [32, 32]
    chunk = reader.read(event)
    assert (chunk.output_ids, chunk.stop_reason) == ([32], "abort")
    nothing = ChunkReader(request()).read(meta(0, 0, finish_reason={"type": "abort"}))
    assert (nothing.output_ids, nothing.stop_reason) == ([], "abort")


@pytest.mark.parametrize("status, error", [(400, InvalidRequest), (503, EngineUnavailable)])
def test_refusals_in_a_stream_are_errors_of_their_status(
    status: int, error: type[Exception]
) -> None:
    finish = {"type": "abort", "message": "bad grammar", "status_code": status}
    with fails_with(error, "bad grammar"):
        ChunkReader(request()).read(meta(0, 0, finish_reason=finish))


class Response:
    """As much of aiohttp's as is read."""

    def __init__(self, blocks: list[bytes]) -> None:
        self.content = self
        self._blocks = blocks

    async def iter_any(self) -> AsyncIterator[bytes]:
        for block in self._blocks:
            yield block


STREAM = (
    b'data: {"a": 1}\n\ndata: {"b": "\xc3\xa9"}\n\ndata:{"c": 3}\n\n'
    b'data: [DONE]\n\ndata: {"d": 4}\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 1000])
async def test_events_are_read_wherever_the_stream_is_cut(size: int) -> None:
    blocks = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    found = [event async for event in events(Response(blocks))]  # type: ignore[arg-type]
    assert found == [{"a": 1}, {"b": "é"}, {"c": 3}]


def test_capabilities_are_read_from_the_server_info() -> None:
    sglang = capabilities_of({"grammar_backend": "xgrammar"})
    assert sglang.grammar and sglang.penalties and sglang.top_logprobs and not sglang.seed
    assert not capabilities_of({"grammar_backend": "none"}).grammar
    backends = ("xgrammar", "llguidance", "none")
    tags = [capabilities_of({"grammar_backend": each}).structural_tag for each in backends]
    assert tags == [True, False, False]
    assert capabilities_of({"enable_deterministic_inference": True}).seed
    listed = capabilities_of({"capabilities": ["min_p", "seed"]})
    assert listed.min_p and listed.seed and not (listed.grammar or listed.top_logprobs)
