"""`engine.adapters`: names and folders, and what they cannot be set beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from any_agent.config import load_config
from any_agent.errors import ConfigError
from tests.support.errors import fails_with

MODELS = (
    '[{"model_name": "mine", "litellm_params": {"model": "openai/m", "api_key": "os.environ/K"}}]'
)


def test_adapters_are_set_by_name_in_files_and_on_command_lines(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"engine": {"adapters": {"a": "/one", "v1.2": "~/two"}}}))
    config = load_config(file, ["engine.adapters.b=/three=3"], environ={})
    home = str(Path("~/two").expanduser())
    assert config.engine.adapters == {"a": "/one", "v1.2": home, "b": "/three=3"}
    assert load_config(None, [], environ={}).engine.adapters == {}


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "a@b", "ä", "x" * 65])
def test_a_name_that_no_call_or_record_could_have_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"engine": {"adapters": {name: "/one"}}}))
    with fails_with(ConfigError, "engine.adapters"):
        load_config(file, environ={})


@pytest.mark.parametrize(
    "beside",
    [
        ["engine.kind=sglang"],
        ["engine.urls=http://127.0.0.1:1", "server.ranks=1"],
        ["litellm.config=/some/config.yaml"],
        ["model.name=mine"],
        ["model.policy_names=other,mine"],
        [f"frozen.model_list={MODELS}"],
    ],
    ids=lambda beside: beside[0].partition("=")[0],
)
def test_what_contradicts_adapters_is_refused_by_name(beside: list[str]) -> None:
    load_config(None, beside, environ={})
    name = beside[0].partition("=")[0]
    with fails_with(ConfigError, "engine.adapters", name):
        load_config(None, [*beside, "engine.adapters.mine=/one"], environ={})
