"""A service trains an adapter: its engines sample with the very policy that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from peft import PeftModel
from transformers import AutoModelForCausalLM

from any_agent.auth.access import run_dir_of
from any_agent.rundir.layout import latest_step
from tests.support.e2e.live_run import live_config, recompute, recorded, run_live, steps_of

TOLERANCE = 1e-4
LORA = {"train.lora.rank": 4, "train.lora.alpha": 16, "train.lr": 1e-2}


def test_engines_sample_with_the_adapter_that_is_trained(
    tmp_path: Path, tiny_model_dir: Path, record_property: Any
) -> None:
    small = {"rollout.batch_size": 8, "rollout.eta": 0, "train.steps": 3}
    small |= {"train.keep_weights": 9, "server.ranks": 1}
    config = live_config(tmp_path, tiny_model_dir, **(LORA | small))
    assert run_live(config, agents=8) >= 24
    run = run_dir_of(config)

    checks = recompute(config, recorded(config))
    versions = {int(v) for c in checks for v in c.interaction.output_versions}
    worst = max(c.error for c in checks)
    assert {0, 1, 2, 3} <= versions
    lines = steps_of(run)
    mismatch = max(line["mismatch_max"] for line in lines if "mismatch_max" in line)
    record_property(
        "figure",
        f"{len(checks)} calls under versions {sorted(versions)}: recorded and recomputed "
        f"log-probabilities differ by {worst:.1e}, sampled and trained ones by {mismatch:.1e}",
    )
    assert worst < TOLERANCE
    assert [line["step"] for line in lines] == [1, 2, 3] and 0 < mismatch < TOLERANCE

    assert latest_step(run.checkpoints) == 3
    checkpoint = run.checkpoints / "step-00000003"
    trained = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").state_dict()
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype="auto")
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    by_peft = PeftModel.from_pretrained(base, checkpoint / "adapter").merge_and_unload()
    for name, tensor in by_peft.state_dict().items():
        np.testing.assert_allclose(tensor, trained[name], atol=1e-6, rtol=1e-6, err_msg=name)
    assert any(not np.array_equal(before[name], tensor) for name, tensor in trained.items())
