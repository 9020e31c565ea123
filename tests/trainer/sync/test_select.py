"""By which way weights go."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher.engines import SHARED_GPUS
from tests.support.errors import fails_with
from trainer.sync import way_of

HERE = ("http://127.0.0.1:1", "http://127.0.0.1:2")
ELSEWHERE = ("http://127.0.0.1:1", "http://10.0.0.2:1")


def settings(*given: str) -> Config:
    return load_config(None, ["model.path=m", *given], environ={})


@pytest.mark.parametrize(
    ("sharing", "engines", "way"),
    [
        ("none", HERE, "distributed"),
        ("none", ELSEWHERE, "distributed"),
        ("all", HERE, "tensor"),
        ("all", ELSEWHERE, "disk"),
        # Neither can all of them read its memory, nor can all be in one group.
        ("some", HERE, "disk"),
    ],
)
def test_the_way_of_weights_follows_who_shares_the_gpu(
    sharing: str, engines: tuple[str, ...], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_GPUS, sharing)
    assert way_of(settings(), cuda=True, engines=engines) == way
    assert way_of(settings(), cuda=False, engines=engines) == "disk"
    assert way_of(settings("engine.device=cpu"), cuda=True, engines=engines) == "disk"
    assert way_of(settings("engine.weight_sync=disk"), cuda=True, engines=engines) == "disk"


def test_a_way_of_weights_that_shared_gpus_rule_out_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sharing, wanted, refused in (
        ("none", "distributed", False),
        ("all", "tensor", False),
        ("all", "distributed", True),
        ("some", "tensor", True),
        ("some", "distributed", True),
    ):
        monkeypatch.setenv(SHARED_GPUS, sharing)
        config = settings(f"engine.weight_sync={wanted}")
        assert way_of(config, cuda=False, engines=HERE) == wanted
        names = (f"weight_sync={wanted}", f"{sharing} of the engines")
        with fails_with(ConfigError, *names) if refused else nullcontext():
            assert way_of(config, cuda=True, engines=HERE) == wanted
    with fails_with(ConfigError, "engine.weight_sync=tensor"):
        way_of(settings("engine.weight_sync=tensor"), cuda=True, engines=ELSEWHERE)
