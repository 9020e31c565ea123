"""The tutorial from LiteLLM to a trained model, run as it is written: a local provider stands in
for OpenAI, a tiny model for the one of the hub, and the steps are fewer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.test_readme import ROOT, block
from tests.support.e2e.serving import CLI, environment
from tests.support.fake_provider import Provider
from tests.support.in_thread import served_in_thread
from tests.support.ports import own_port
from tests.support.real_parts import await_url

PAGE = ROOT / "docs" / "tutorials" / "from-litellm.md"


def test_the_five_steps_of_the_page_lead_from_litellm_to_training(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    (tmp_path / "config.yaml").write_text(block("config", [PAGE]))
    port = own_port()
    (tmp_path / "agent.py").write_text(block("agent", [PAGE]).replace(":8000", f":{port}"))
    command = block("serve", [PAGE]).strip().replace("Qwen/Qwen3-0.6B", str(tiny_model_dir))
    command = command.replace("any-agent", " ".join(CLI), 1)
    command = command.replace("train.steps=20", "train.steps=2")
    more = f"--port {port} sampling.max_new_tokens=8 model.enable_thinking=false"
    provider = Provider()
    with served_in_thread(provider, within=30), (tmp_path / "service.log").open("w") as log:
        base = f"{provider.url}/v1"
        own = environment(OPENAI_API_KEY="sk-of-a-provider", OPENAI_BASE_URL=base)
        service = subprocess.Popen(
            f"exec {command} {more}",
            shell=True,
            cwd=tmp_path,
            env=own,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            await_url(f"http://127.0.0.1:{port}/readyz", service, tmp_path / "service.log")
            agent = subprocess.run(
                [sys.executable, "agent.py"],
                cwd=tmp_path,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert agent.returncode == 0, agent.stderr
            assert service.wait(120) == 0, (tmp_path / "service.log").read_text()
        finally:
            service.terminate()
            service.wait(60)
    said = (tmp_path / "service.log").read_text()
    assert re.search(r"^step +2/2 ", said, re.M), said
    assert list(tmp_path.glob("runs/*/my-exp/trial-1/checkpoints/step-*2"))
    assert {body["model"] for body in provider.bodies} == {"gpt-4o-mini"}
