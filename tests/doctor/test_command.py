"""``any-agent doctor``: what it examines, its exit codes, and planted faults as people see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from any_agent.cli.main import main
from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry, publish
from tests.support.other_weights import publish_other
from tests.support.ports import own_port
from tests.support.real_parts import embedded_engine

CHANGED = "<|im_start|>assistant\\n'"


def test_wrong_arguments_are_refused_by_name(
    with_template: Callable[[Callable[[str], str]], Path],
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, said in (
        (["/no/such/model"], "/no/such/model"),
        ([str(tmp_path), str(tmp_path)], "one model"),
        ([str(tmp_path), "--engine", "localhost:1"], "localhost:1"),
        ([str(tmp_path), "--engine", "http://localhost:port"], "http://localhost:port"),
        ([str(tmp_path), "--url", "http://[::1"], "http://[::1"),
        ([str(tmp_path), "model.rendererr=x"], "model.renderer"),
        ([f"root={tmp_path}"], "nothing to check"),
        ([str(tmp_path)], "tokenizer"),
        ([str(with_template(lambda _: "{% if %}x"))], "Jinja"),
        ([str(tiny_model_dir), "--renderer", "foo"], "'foo'"),
        (["--experiment", "nope", "--trial", "t", f"root={tmp_path}"], "no such run"),
    ):
        assert main(["doctor", *arguments]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and "Traceback" not in shown.err
        assert not shown.out


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_passwords_are_not_shown(form: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    at = f"127.0.0.1:{own_port()}"
    urls = [f"http://me:sesame@{at}", f"http://:sesame@{at}"]
    engines = [part for url in urls for part in ("--engine", url)]
    arguments = [*engines, "--url", urls[0], "--key", "sk-sesame", *form]
    assert main(["doctor", *arguments]) == 1
    shown = capsys.readouterr()
    assert at in shown.out
    assert "sesame" not in shown.out + shown.err
    assert main(["doctor", "--engine", "ftp://me:sesame@host"]) == 2
    assert "sesame" not in capsys.readouterr().err


def test_a_model_without_a_template_fails_the_check_of_rendering(
    with_template: Callable[[Callable[[str], str]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_template(lambda text: text + " ")
    (folder / "chat_template.jinja").unlink()
    assert main(["doctor", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "FAILED rendering, template: " in out and "chat_template.jinja" in out
    assert "model.renderer=qwen3" in out
    assert main(["doctor", str(folder), "--renderer", "qwen3"]) == 0
    assert "3 not checked" in capsys.readouterr().out
    assert main(["doctor", str(folder), "--renderer", "default"]) == 2
    assert "chat_template.jinja" in capsys.readouterr().err


def test_a_wrong_template_fails_the_check_with_a_remedy(
    with_template: Callable[[Callable[[str], str]], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = with_template(lambda text: text.replace(CHANGED, "<|im_start|>model\\n'"))
    assert main(["doctor", str(folder), "--renderer", "qwen3"]) == 1
    out = capsys.readouterr().out
    assert "FAILED rendering, template: " in out
    assert "as the model's own chat template does" in out
    assert "to do: set model.renderer to this model's family, or to default" in out
    assert main(["doctor", str(folder), "--renderer", "qwen3", "--quick"]) == 1
    capsys.readouterr()
    assert main(["doctor", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["subject"]["renderer"] == "default"


@pytest.fixture
def trial(tiny_model_dir: Path, tmp_path: Path) -> Iterator[tuple[RunDir, str]]:
    """A trial that has published version 3, and an engine of the model as it was."""
    config = Config(root=tmp_path / "runs", experiment="e", trial="t")
    run = RunDir.of(config.root, config.user, "e", "t")
    run.create()
    with embedded_engine(tiny_model_dir, own_port(), tmp_path) as url:
        settings = {
            "model": {"path": str(tiny_model_dir), "enable_thinking": False},
            "engine": {"urls": [url]},
            "server": {"ranks": 1},
        }
        (run.path / "config.yaml").write_text(yaml.safe_dump({**settings, "experiment": "e"}))
        publish_other(tiny_model_dir, run.weights, 3)
        yield run, url


@pytest.mark.service
def test_stale_weights_of_a_trials_engine_are_found(
    trial: tuple[RunDir, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, url = trial
    root = str(run.path.parents[2])
    named = ["doctor", "--experiment", "e", "--trial", "t", f"root={root}"]
    # Which engines a run started itself, its ranks tell.
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace(f"- {url}", "").replace("urls:", "urls: []"))
    entry = RegistryEntry(name="rank-0", boot_id="b", url="http://x", pid=1, engine_url=url)
    publish(run.registry, entry)
    assert main(named) == 1
    out = capsys.readouterr().out
    assert "FAILED versions, published: the engine serves version 0, the run's newest is 3" in out
    assert out.count("FAILED") == 1

    def load(folder: str) -> None:
        body = {"model_path": folder, "weight_version": "3"}
        assert httpx.post(f"{url}/update_weights_from_disk", json=body, timeout=60).is_success

    model = json.loads(httpx.get(f"{url}/model_info").content)["model_path"]
    load(model)
    named += ["--engine", url]
    assert main(named) == 1
    out = capsys.readouterr().out
    assert "FAILED logprobs, forward pass, T=1: " in out and "other weights" in out
    assert "FAILED versions" not in out
    load(str(run.weights / "v00000003"))
    assert main(named) == 0
