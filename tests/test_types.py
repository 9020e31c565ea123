from __future__ import annotations

from collections import UserDict
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from any_agent.errors import ConfigError, InvalidRequest
from any_agent.types import (
    GenerationHyperparameters,
    LLMRequest,
    ModelRequest,
    ModelResponse,
    SampledSession,
)
from tests.support.errors import fails_with


def test_a_changed_copy_of_sampling_settings_leaves_the_first_alone() -> None:
    given = GenerationHyperparameters(temperature=0.5)
    made = given.new(n_samples=1, max_new_tokens=7, stop=["x"], stop_token_ids=[1, 2])
    assert made == GenerationHyperparameters(
        temperature=0.5, max_new_tokens=7, stop=("x",), stop_token_ids=(1, 2)
    )
    assert given.new(stop="END", stop_token_ids=7) == given.new(stop=["END"], stop_token_ids=[7])
    assert hash(made) != hash(given)
    assert given.temperature == 0.5 and given.stop == ()


def test_errors_of_a_changed_copy_name_the_fix() -> None:
    with fails_with(ValueError, "n_samples is 4", "sessions.group_size"):
        GenerationHyperparameters().new(n_samples=4)
    with fails_with(TypeError, "greedy, heat", "min_p"):
        GenerationHyperparameters().new(heat=1, greedy=True)


@pytest.mark.parametrize(
    ("pad", "eos", "ids"),
    [(8, 9, (5, 8, 9)), (9, 9, (5, 9)), (None, 5, (5,)), (None, None, (5,))],
)
def test_the_tokenizers_end_tokens_become_stop_tokens(
    pad: Any, eos: Any, ids: tuple[int, ...]
) -> None:
    tokenizer = SimpleNamespace(pad_token_id=pad, eos_token_id=eos)
    given = GenerationHyperparameters(stop_token_ids=(5,))
    assert given.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == ids


def test_sampling_becomes_arguments_of_openais_client() -> None:
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


@pytest.mark.parametrize(
    "given",
    [
        [5, 6],
        (5, 6),
        [np.int64(5), np.int32(6)],
        np.array([5, 6]),
        np.array([[5, 6]], dtype=np.uint16),
        torch.tensor([5, 6]),
        torch.tensor([[5, 6]]),
        [torch.tensor([5, 6])],
        [[5, 6]],
        UserDict(input_ids=[5, 6], attention_mask=[1, 1]),
        {"input_ids": torch.tensor([[5, 6]])},
    ],
)
def test_ids_of_any_form_are_a_list(given: Any) -> None:
    request = LLMRequest(rid="r", input_ids=given)
    assert request == ModelRequest("r", [5, 6])
    assert list(map(type, request.input_ids)) == [int, int]


def test_packed_ids_stay_packed() -> None:
    ids = np.array([5, 6], dtype=np.int32)
    assert ModelRequest(input_ids=ids).input_ids is ids


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("5 6", "str '5 6'"),
        (["5"], "'5' (str)"),
        ([5, 6.0], "6.0 (float)"),
        ([5, True], "True (bool)"),
        ([[5], [6]], "[5] (list)"),
        (torch.tensor([5.0]), "float32 of the shape [1]"),
        (torch.tensor([[5], [6]]), "int64 of the shape [2, 1]"),
        (np.array(5), "int64 of the shape []"),
        (5, "int 5"),
        (None, "NoneType None"),
        ({"ids": [5]}, "dict"),
    ],
)
def test_input_ids_that_are_no_prompt_are_refused_by_name(given: Any, says: str) -> None:
    with fails_with(InvalidRequest, says, param="input_ids"):
        ModelRequest(input_ids=given)


def test_a_request_takes_the_parameter_names_of_openai() -> None:
    messages = [{"role": "user", "content": "hi"}]
    request = ModelRequest(prompt=messages, model="gpt-4o", temperature=0.5, max_tokens=7)
    assert request.gconfig == GenerationHyperparameters(temperature=0.5, max_new_tokens=7)
    assert (request.model, request.temperature, request.max_tokens) == ("gpt-4o", 0.5, 7)
    later = replace(request, gconfig=request.gconfig.new(max_new_tokens=3))
    assert (later.max_tokens, later.prompt, later.rid) == (3, messages, request.rid)
    same = GenerationHyperparameters(temperature=0.5, top_p=0.9)
    assert ModelRequest(gconfig=same, temperature=0.5).gconfig is same
    with pytest.raises(FrozenInstanceError):
        request.prompt = "other"  # type: ignore[misc]


def test_a_request_that_contradicts_itself_is_refused() -> None:
    gconfig = GenerationHyperparameters(temperature=0.5)
    with fails_with(ValueError, "temperature is 1.0", "gconfig.temperature is 0.5"):
        ModelRequest(gconfig=gconfig, temperature=1.0)
    with fails_with(ValueError, "max_tokens is 7", "gconfig.max_new_tokens is 16384"):
        ModelRequest(gconfig=gconfig, max_tokens=7)
    with fails_with(ValueError, "input_ids", "prompt"):
        ModelRequest(input_ids=[1], prompt="hi")


class Letters:
    """Decodes ids to letters; 0 is a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        return "".join(chr(96 + i) for i in ids if i or not skip_special_tokens)


@pytest.mark.parametrize(
    ("ids", "stop", "text"),
    [
        ([1, 2, 3], None, "abc"),
        ([1, 0, 2, 0], 0, "ab"),
        ([1, 2, 5], 5, "ab"),
        ([5, 2, 5], 5, "eb"),
        ([1, 2, 3], "bc", "a"),
        ([1, 2, 2], "b", "a"),
        ([], None, ""),
    ],
)
def test_a_responses_text_is_its_decoded_tokens(ids: list[int], stop: Any, text: str) -> None:
    n = len(ids)
    response = ModelResponse([1], ids, [-1.0] * n, [0] * n, "stop", stop, Letters())
    assert response.text == text
    assert (response.token_ids, response.logprobs) == (ids, [-1.0] * n)
    with fails_with(ConfigError, "tokenizer=", "output_tokens"):
        _ = replace(response, tokenizer=None).text


def test_a_response_has_the_field_names_of_areal() -> None:
    response = ModelResponse([1, 2, 3], [4, 5], [-1.0, -2.0], [0, 0], "stop")
    assert (response.input_tokens, response.output_tokens) == ([1, 2, 3], [4, 5])
    assert (response.input_len, response.output_len) == (3, 2)


def test_a_sampled_session_has_a_temperature_per_row() -> None:
    row = {"input_ids": np.zeros(2, np.int32)}
    assert SampledSession("s", "g", [row], [None]).metadata == {}
    with fails_with(ValueError, "session s", "temperature"):
        SampledSession("s", "g", [row], [])
