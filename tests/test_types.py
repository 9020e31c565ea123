from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from any_agent.types import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    SampledSession,
)


def test_a_changed_copy() -> None:
    given = GenerationHyperparameters(temperature=0.5)
    made = given.new(n_samples=1, max_new_tokens=7, stop=["x"], stop_token_ids=[1, 2])
    assert made == GenerationHyperparameters(
        temperature=0.5, max_new_tokens=7, stop=("x",), stop_token_ids=(1, 2)
    )
    assert hash(made) != hash(given)
    assert given.temperature == 0.5 and given.stop == ()


def test_errors_of_a_changed_copy_name_the_fix() -> None:
    with pytest.raises(ValueError, match=r"n_samples is 4: .*sessions\.group_size"):
        GenerationHyperparameters().new(n_samples=4)
    with pytest.raises(TypeError, match=r"greedy, heat: no such field; there are .*temperature"):
        GenerationHyperparameters().new(heat=1, greedy=True)


@pytest.mark.parametrize(
    ("pad", "eos", "ids"),
    [(8, 9, (5, 8, 9)), (9, 9, (5, 9)), (None, 5, (5,)), (None, None, (5,))],
)
def test_the_tokenizers_ends_stop_it(pad: Any, eos: Any, ids: tuple[int, ...]) -> None:
    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=eos)
    given = GenerationHyperparameters(stop_token_ids=(5,))
    assert given.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == ids


def test_as_arguments_of_openais_client() -> None:
    given = GenerationHyperparameters(max_new_tokens=7, temperature=0.5, stop=("x",), top_k=3)
    assert given.to_openai_args_dict() == {
        "temperature": 0.5,
        "top_p": 1.0,
        "max_completion_tokens": 7,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop": ["x"],
    }
    assert given.to_openai_args_dict(api_format="responses") == {
        "temperature": 0.5,
        "top_p": 1.0,
        "max_output_tokens": 7,
    }
    agents = given.to_openai_args_dict(["top_p", "max_new_tokens"], "openai-agents")
    assert agents == {"temperature": 0.5, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def test_a_request_needs_its_ids_only() -> None:
    one, other = ModelRequest(input_ids=[1]), ModelRequest(input_ids=[1], tokenizer=object())
    assert one.rid and one.rid != other.rid
    assert one.gconfig == GenerationHyperparameters()
    assert "tokenizer" not in repr(other)


def test_a_response_under_areals_names() -> None:
    response = ModelResponse([1, 2, 3], [4, 5], [-1.0, -2.0], [0, 0], "stop")
    assert (response.input_tokens, response.output_tokens) == ([1, 2, 3], [4, 5])
    assert (response.input_len, response.output_len) == (3, 2)


def test_a_sampled_session_has_a_temperature_per_row() -> None:
    row = {"input_ids": np.zeros(2, np.int32)}
    assert SampledSession("s", "g", [row], [None]).metadata == {}
    with pytest.raises(ValueError, match="session s: one temperature per row"):
        SampledSession("s", "g", [row], [])
