"""Log-probabilities of given tokens, also in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from any_agent.doctor import forward_pass
from any_agent.doctor.forward_pass import Forward
from tests.support.errors import fails_with
from tests.support.true_logprobs import TrueModel

PROMPT, OUTPUT = list(range(10, 30)), list(range(50, 63))


@pytest.mark.parametrize("part", [1024, 5, 1])
async def test_a_forward_pass_has_the_true_logprobs(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(forward_pass, "PART", part)
    forward, true = Forward(tiny_model_dir), TrueModel(tiny_model_dir)
    table = true.logprobs(PROMPT, OUTPUT, {"temperature": 0.5})
    wanted = table.gather(-1, torch.tensor(OUTPUT)[:, None])[:, 0].tolist()
    assert await forward.logprobs(PROMPT, OUTPUT, 0.5) == pytest.approx(wanted, abs=1e-5)
    # Two outputs in one sequence, each at its own temperature.
    ids = [*PROMPT, *OUTPUT, *PROMPT, *OUTPUT]
    scales = [None] * 20 + [0.5] * 13 + [None] * 20 + [2.0] * 13
    second = true.logprobs([*PROMPT, *OUTPUT, *PROMPT], OUTPUT, {"temperature": 2.0})
    wanted += second.gather(-1, torch.tensor(OUTPUT)[:, None])[:, 0].tolist()
    assert forward.token_logprobs(ids, scales) == pytest.approx(wanted, abs=1e-5)
    with fails_with(ValueError, "context"):
        forward.token_logprobs([1, 2], [1.0, 1.0])
