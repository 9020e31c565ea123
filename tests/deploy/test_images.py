"""The images and the compose file, as far as can be seen without building them: what they copy is
there, what they run is ours, nothing of them is secret, and nobody in them is root."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from any_agent.cli.main import _parser
from any_agent.config import load_config
from any_agent.runtime.command_line import parse
from tests.support.proxy import our_app

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = ["serve", "train"]
CONFIGS = sorted(DEPLOY.glob("*.yaml"))
CONFIGS.remove(DEPLOY / "compose.yaml")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def instructions(image: str) -> list[tuple[str, str]]:
    """``(INSTRUCTION, the rest)``, continued lines as one."""
    text = (DEPLOY / "docker" / f"{image}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line.strip())
    ]


def variables(image: str) -> dict[str, str]:
    pairs = [pair for word, rest in instructions(image) if word == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.mark.parametrize("image", IMAGES)
def test_all_that_is_copied_is_there(image: str) -> None:
    kept = (DEPLOY / "docker" / f"{image}.Dockerfile.dockerignore").read_text().splitlines()
    assert kept[1] == "*"
    copied = [
        name
        for word, rest in instructions(image)
        if word in ("COPY", "ADD")
        for name in rest.split()[:-1]
    ]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in kept, f"{name} is left out of what the build sees"
    # And all that is installed.
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = found["tool"]["setuptools"]["packages"]["find"]["include"]
    for top in {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}:
        if any(fnmatch.fnmatch(top, pattern) for pattern in packages):
            assert top in copied, f"{top} is a package of ours that the image lacks"


@pytest.mark.parametrize("image", IMAGES)
def test_what_it_installs(image: str) -> None:
    runs = " ".join(rest for word, rest in instructions(image) if word == "RUN")
    (extras,) = re.findall(r"-c constraints.txt '\.\[([\w,]+)\]'", runs)
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["optional-dependencies"].keys() >= set(extras.split(","))
    (program,) = (rest for word, rest in instructions(image) if word == "ENTRYPOINT")
    assert json.loads(program) == ["/opt/any-agent/bin/any-agent"]
    assert "any-agent" in found["scripts"]


@pytest.mark.parametrize("image", IMAGES)
def test_its_command_is_ours(image: str) -> None:
    (command,) = (rest for word, rest in instructions(image) if word == "CMD")
    assert parse(_parser(), json.loads(command)).config == "/config/my.yaml"


@pytest.mark.parametrize("image", IMAGES)
def test_its_settings_are_ours(image: str) -> None:
    """They are those of a service that only SGLang's engine serves, on all addresses."""
    config = load_config(None, environ=variables(image))
    assert (config.engine.kind, str(config.root)) == ("sglang", "/runs")
    assert config.engine.python == "/usr/local/bin/sglang-python"
    (port,) = (rest for word, rest in instructions(image) if word == "EXPOSE")
    assert int(port) == config.server.port


@pytest.mark.parametrize("image", IMAGES)
def test_nobody_is_root(image: str) -> None:
    words = [word for word, _ in instructions(image)]
    users = [rest for word, rest in instructions(image) if word == "USER"]
    assert users == ["agent"]
    # Nothing is run as root after that, and what begins the container is not.
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    assert words.index("USER") < words.index("ENTRYPOINT")


@pytest.mark.parametrize("image", IMAGES)
def test_no_secret_is_in_it(image: str) -> None:
    for word, rest in instructions(image):
        if word in ("ENV", "ARG"):
            assert not SECRET.search(rest), rest
    # Not even what the build could see is secret.
    kept = (DEPLOY / "docker" / f"{image}.Dockerfile.dockerignore").read_text().splitlines()
    assert {"*", "**/.env", "**/*.key"} <= set(kept)


@pytest.mark.parametrize("image", IMAGES)
def test_its_health_is_asked_of_a_route_of_ours(image: str) -> None:
    (check,) = (rest for word, rest in instructions(image) if word == "HEALTHCHECK")
    command = json.loads(check[check.index("[") :])
    (port, path) = re.findall(r"http://127.0.0.1:(\d+)(/\w+)", command[-1])[0]
    assert port == variables(image)["ANY_AGENT_SERVER__PORT"]
    assert path in our_app().openapi()["paths"]
    compile(command[-1], "healthcheck", "exec")


# -- compose ---------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


@pytest.mark.parametrize("image", IMAGES)
def test_a_service_of_each_image(image: str) -> None:
    service = compose()["services"][image]
    context = (DEPLOY / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).samefile(
        DEPLOY / "docker" / f"{image}.Dockerfile"
    )
    assert parse(_parser(), service["command"]).config == "/config/my.yaml"
    (command,) = (rest for word, rest in instructions(image) if word == "CMD")
    assert service["command"] == json.loads(command)
    # Nobody but this machine reaches it, unless somebody says so.
    assert [port.partition(":-")[2].partition("}")[0] for port in service["ports"]] == ["127.0.0.1"]
    volumes = dict(volume.split(":") for volume in service["volumes"][1:])
    assert set(volumes) <= set(compose()["volumes"])
    (mounted,) = (rest for word, rest in instructions(image) if word == "VOLUME")
    assert set(volumes.values()) == set(json.loads(mounted))


@pytest.mark.parametrize("image", IMAGES)
def test_its_environment(image: str) -> None:
    given = compose()["services"][image]["environment"]
    # A container without a key would be refused: it is asked for before it is started.
    assert "${ANY_AGENT_SERVER__ADMIN_KEY:?" in given["ANY_AGENT_SERVER__ADMIN_KEY"]
    for name, value in given.items():
        if SECRET.search(name):
            assert value.startswith("${"), f"{name} is written down"
    key = {"ANY_AGENT_SERVER__ADMIN_KEY": "a-key-of-somebody"}

    def environment(**said: str) -> dict[str, str]:
        return {name: interpolated(str(text), **key, **said) for name, text in given.items()}

    config = load_config(None, environ=variables(image) | environment())
    assert config.server.public_url == "http://127.0.0.1:8000"
    # Sessions are told where they really are.
    elsewhere = load_config(None, environ=variables(image) | environment(PORT="9000"))
    assert elsewhere.server.public_url == "http://127.0.0.1:9000"
    # What is under way has the time that compose waits for it, and a rest for the end.
    grace = compose()["services"][image]["stop_grace_period"]
    assert 60 <= config.server.drain_timeout <= 60 * int(grace.removesuffix("m")) - 20


def interpolated(text: str, **variables: str) -> str:
    """As compose does it: `${NAME:-default}`, also within a default, and `${NAME:?complaint}`."""
    inner = re.compile(r"\$\{(\w+):[-?]([^${}]*(?:\$\$[^${}]*)*)\}")
    while (found := inner.search(text)) is not None:
        value = variables.get(found[1]) or found[2]
        text = text[: found.start()] + value + text[found.end() :]
    return text


@pytest.mark.parametrize("image", IMAGES)
def test_the_file_of_settings_that_compose_names(image: str) -> None:
    """In the short form `my.yaml` would be a volume, and what is not there a new folder."""
    settings = compose()["services"][image]["volumes"][0]
    assert (settings["type"], settings["read_only"]) == ("bind", True)
    assert settings["bind"] == {"create_host_path": False}
    assert settings["target"] == compose()["services"][image]["command"][-1]
    assert (DEPLOY / interpolated(settings["source"])).is_file()
    assert interpolated(settings["source"], CONFIG="my.yaml") == "my.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_settings_that_come_with_it(path: Path) -> None:
    config = load_config(str(path), environ={})
    assert config.model.path
    assert config.sessions.group_size is not None
    assert config.rollout.batch_size % config.sessions.group_size == 0
