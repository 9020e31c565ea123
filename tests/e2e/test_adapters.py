"""`any-agent serve --no-train` with adapters: a model of its own each, over the public URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.e2e.serving import run_cli, serve
from tests.support.engine.adapters import by_peft, with_settings, write_adapter
from tests.support.engine.embedded import error_of
from tests.support.trainer.adapters import CONFIG, stirred
from trainer.adapter_files import save_adapter
from trainer.policy import Policy

pytestmark = pytest.mark.service


def answered(url: str, model: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """One call in a session of its own: the model, the interaction and its tokens."""
    with httpx.Client(base_url=url, timeout=120) as http:
        session = http.post("/rl/v1/start_session", json={"mode": "eval"}).json()
        messages = [{"role": "user", "content": f"{model}, say a number."}]
        body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 1}
        headers = {"Authorization": f"Bearer {session['api_key']}"}
        answer = http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        place = f"/rl/v1/sessions/{session['session_id']}/interactions"
        tokens = http.get(f"{place}/{answer.json()['id']}/tokens").json()
        (interaction,) = http.get(place).json()["interactions"]
        return model, interaction, tokens


def test_a_service_samples_from_each_adapter_by_its_name(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    trained, other = tmp_path / "trained", tmp_path / "other"
    save_adapter(stirred(Policy.load(tiny_model_dir, CONFIG)), trained)
    write_adapter(tiny_model_dir, other, seed=4, r=2)
    dora = with_settings(other, tmp_path / "dora", use_dora=True)
    arguments = ["--no-train", "--model", str(tiny_model_dir), "server.port=0", "server.ranks=1"]
    refused = run_cli("serve", *arguments, f"engine.adapters.mine={dora}", cwd=tmp_path)
    assert refused.returncode == 2
    assert "engine.adapters.mine" in refused.stderr and "use_dora" in refused.stderr
    trains = run_cli("serve", *arguments[1:], f"engine.adapters.mine={other}", cwd=tmp_path)
    assert trains.returncode == 2
    assert "--no-train" in trains.stderr

    arguments += [f"engine.adapters.trained={trained}", f"engine.adapters.other={other}"]
    with serve(*arguments, cwd=tmp_path) as served:
        listed = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["policy", "trained", "other"]
        models = ("policy", "trained", "other") * 3
        with ThreadPoolExecutor(len(models)) as threads:
            calls = list(threads.map(lambda model: answered(served.url, model), models))
    of = {
        name: by_peft(tiny_model_dir, path)
        for name, path in (("trained", trained), ("other", other))
    }
    of["policy"] = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    for model, interaction, tokens in calls:
        ids, begin = tokens["ids"], tokens["prompt"]
        prompt, output, logprobs = ids[:begin], ids[begin:], tokens["logprobs"][begin:]
        assert output
        assert error_of(of[model], prompt, output, logprobs) < 1e-4
        others = (error_of(of[name], prompt, output, logprobs) for name in of if name != model)
        assert min(others) > 1e-2, "models that agree prove nothing"
        reason = interaction["untrainable_reason"]
        assert reason == (None if model == "policy" else "adapter")
        assert (interaction["adapter"] or "policy@").partition("@")[0] == model
