"""What may be set for engines: their options, variables and addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from tests.support.errors import fails_with

SGLANG = "engine.kind=sglang"


def settings(*overrides: str) -> Config:
    return load_config(None, overrides, environ={})


def test_options_come_as_text_list_or_mapping() -> None:
    for given in (
        "--mem-fraction-static 0.8 --enable-metrics",
        "[--mem-fraction-static, '0.8', --enable-metrics]",
        "{mem_fraction_static: 0.8, enable-metrics: true, disable-cuda-graph: false}",
    ):
        config = settings(SGLANG, f"engine.arguments={given}")
        assert config.engine.arguments == ("--mem-fraction-static", "0.8", "--enable-metrics")
    config = settings(SGLANG, "engine.arguments={cuda-graph-bs: [1, 2]}")
    assert config.engine.arguments == ("--cuda-graph-bs", "1", "2")
    for given in ("python=/usr/bin/python3", "gpus=2", "arguments=--x"):
        with fails_with(ConfigError, "engine.kind=sglang"):
            settings(f"engine.{given}")


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("--model-path /x", "model.path is served"),
        ("--port=3", "finds a free port"),
        ("--tp 2", "engine.gpus"),
        ("--tp-size=2", "engine.gpus"),
        ("--dp-size 2", "server.ranks"),
        ("--max_running_requests 3", "engine.max_running_requests"),
        ("--weight-v 3", "counts its versions"),
        ("{dtype: half}", "model.dtype"),
        ("--api-key s3cret", "a key of its own"),
        ("--tokenizer-worker-num 2", "takes no key"),
        ("--grpc-port 9", "no key"),
    ],
)
def test_what_the_service_says_itself_is_refused_by_name(given: str, fix: str) -> None:
    with fails_with(ConfigError, fix) as caught:
        settings(SGLANG, f"engine.arguments={given}")
    assert "s3cret" not in caught.value.message


def test_settings_survive_the_file_that_parts_read(tmp_path: Path) -> None:
    import yaml

    config = settings(SGLANG, "engine.arguments={a-b: 1}", "engine.environment={X: 2, A: b}")
    assert config.engine.environment == {"X": "2", "A": "b"}, "variables are texts"
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(config.dump()))
    assert load_config(path, environ={}).engine == config.engine
