"""The images and the compose file, as far as can be seen without building them: what they copy is
there, what they run is ours, nothing of them is secret, and nobody in them is root."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from any_agent.cli.main import read
from any_agent.config import load_config
from proxy_ext.journal.redis_server import LogOptions, ServerCheck, connect
from tests.support.launcher.children import until
from tests.support.ports import own_port
from tests.support.proxy import our_app
from tests.support.redis_server import require_redis

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
def test_an_image_copies_what_there_is_and_all_that_is_installed(image: str) -> None:
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
def test_an_image_installs_and_runs_what_is_ours_and_not_as_root(image: str) -> None:
    told = instructions(image)
    by_word = {word: [rest for each, rest in told if each == word] for word, _ in told}
    (extras,) = re.findall(r"-c constraints.txt '\.\[([\w,]+)\]'", " ".join(by_word["RUN"]))
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found["optional-dependencies"].keys() >= set(extras.split(","))
    assert json.loads(*by_word["ENTRYPOINT"]) == ["/opt/any-agent/bin/any-agent"]
    assert "any-agent" in found["scripts"]
    assert read(json.loads(*by_word["CMD"])).config == "/config/my.yaml"
    # Settings of a service that only SGLang's engine serves, on all addresses.
    config = load_config(None, environ=variables(image))
    assert (config.engine.kind, str(config.root)) == ("sglang", "/runs")
    assert config.engine.python == "/usr/local/bin/sglang-python"
    assert by_word["EXPOSE"] == [str(config.server.port)]
    # Nothing is run as root after that, and what begins the container is not.
    words = [word for word, _ in told]
    assert by_word["USER"] == ["agent"]
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    assert words.index("USER") < words.index("ENTRYPOINT")
    # No secret is in it, nor in what the build could see.
    assert not [rest for word, rest in told if word in ("ENV", "ARG") and SECRET.search(rest)]
    kept = (DEPLOY / "docker" / f"{image}.Dockerfile.dockerignore").read_text().splitlines()
    assert {"*", "**/.env", "**/*.key"} <= set(kept)


@pytest.mark.parametrize("image", IMAGES)
def test_an_images_health_is_asked_of_a_route_of_ours(image: str) -> None:
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
def test_compose_serves_each_image_on_loopback_with_its_volumes(image: str) -> None:
    service = compose()["services"][image]
    context = (DEPLOY / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).samefile(
        DEPLOY / "docker" / f"{image}.Dockerfile"
    )
    assert read(service["command"]).config == "/config/my.yaml"
    (command,) = (rest for word, rest in instructions(image) if word == "CMD")
    assert service["command"] == json.loads(command)
    # Nobody but this machine reaches it, unless somebody says so.
    assert [port.partition(":-")[2].partition("}")[0] for port in service["ports"]] == ["127.0.0.1"]
    volumes = dict(volume.split(":") for volume in service["volumes"][1:])
    assert set(volumes) <= set(compose()["volumes"])
    (mounted,) = (rest for word, rest in instructions(image) if word == "VOLUME")
    assert set(volumes.values()) == set(json.loads(mounted))


@pytest.mark.parametrize("image", IMAGES)
def test_compose_gives_an_image_its_key_its_url_and_time_to_end(image: str) -> None:
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
    assert config.server.journal is None
    logged = load_config(None, environ=variables(image) | environment(REDIS_PASSWORD="a-word"))
    assert logged.server.journal is not None
    assert logged.server.journal.get_secret_value() == "redis://:a-word@redis:6379/0"
    grace = compose()["services"][image]["stop_grace_period"]
    assert 60 <= config.server.drain_timeout <= 60 * int(grace.removesuffix("m")) - 20


def interpolated(text: str, **variables: str) -> str:
    """Put variables in as compose does: `${NAME}`, `${NAME:-default}`, `${NAME:?complaint}`,
    `${NAME:+text}`, also within each other."""
    inner = re.compile(r"(?<!\$)\$\{(\w+)(?::([-?+])([^${}]*(?:\$\$[^${}]*)*))?\}")
    while (found := inner.search(text)) is not None:
        name, how, more = found.groups()
        given = variables.get(name)
        value = (more if given else "") if how == "+" else given or more or ""
        text = text[: found.start()] + value + text[found.end() :]
    return text.replace("$$", "$")


@pytest.mark.parametrize("image", IMAGES)
def test_the_file_of_settings_that_compose_names(image: str) -> None:
    """In the short form `my.yaml` would be a volume, and what is not there a new folder."""
    settings = compose()["services"][image]["volumes"][0]
    assert (settings["type"], settings["read_only"]) == ("bind", True)
    assert settings["bind"] == {"create_host_path": False}
    assert settings["target"] == compose()["services"][image]["command"][-1]
    assert (DEPLOY / interpolated(settings["source"])).is_file()
    assert interpolated(settings["source"], CONFIG="my.yaml") == "my.yaml"


def test_the_redis_of_compose_keeps_what_a_journal_asks_for(tmp_path: Path) -> None:
    """The command, with a folder and a port of this test, and a password in its environment."""
    require_redis()
    service = compose()["services"]["redis"]
    assert service["image"].partition(":")[2].count(".") == 2, "the tag may change its content"
    shell, option, script = service["command"]
    script = interpolated(script)
    port = own_port()
    for name, value in {"/data": str(tmp_path), "\nEND\n": f"\nport {port}\nEND\n"}.items():
        assert script.count(name) == 1
        script = script.replace(name, value)
    environ = {"PATH": os.environ["PATH"], "REDIS_PASSWORD": "a-word-of-somebody"}
    with subprocess.Popen(
        [shell, option, script], env=environ, stdout=subprocess.DEVNULL
    ) as server:
        try:
            url = f"redis://:a-word-of-somebody@127.0.0.1:{port}/0"
            options = LogOptions(url, "log", lease=5, durability="always", replicas=0)
            check = ServerCheck(options)
            with connect(url, check) as client:
                until(lambda: answers(client), 30)
                assert "on the server's disk before" in check.first(client)
            health = [shell, option, interpolated(service["healthcheck"]["test"][1])]
            health[-1] = health[-1].replace("redis-cli", f"redis-cli -p {port}")
            assert subprocess.run(health, env=environ, check=False).returncode == 0
            environ["REDIS_PASSWORD"] = "another"
            assert subprocess.run(health, env=environ, check=False).returncode != 0
        finally:
            server.terminate()
    for name in ("train", "serve"):
        assert compose()["services"][name]["depends_on"] == {
            "redis": {"condition": "service_healthy", "required": False}
        }


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_settings_load_and_their_batches_hold_whole_groups(path: Path) -> None:
    config = load_config(str(path), environ={})
    assert config.model.path
    assert config.sessions.group_size is not None
    assert config.rollout.batch_size % config.sessions.group_size == 0
