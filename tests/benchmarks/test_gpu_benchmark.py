"""The GPU benchmark runs, here on a CPU at a tiny shape, and says so where there is no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.steps import WORKLOADS, Steps
from trainer.world import leave


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    leave()


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *options])
    return gpu.main()


def test_without_a_gpu_the_benchmark_ends_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch) == 2
    said = capsys.readouterr()
    assert (said.out, "no CUDA GPU is here" in said.err) == ("", True)


def test_the_whole_benchmark_runs_on_a_cpu_and_reports_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = "--micro-batch-tokens 64 --prompt 12 --new 5 --rounds 1"
    out = tmp_path / "figures.json"
    options = f"--device cpu --models tiny --concurrency 1,3 {small} --json {out}".split()
    assert run(monkeypatch, *options) == 0
    said = capsys.readouterr().out
    found = json.loads(out.read_text())["models"]["tiny"]
    assert [one["requests"] for one in found["engine"]] == [1, 3]
    assert all(one["tokens_per_second"] > 0 for one in found["engine"])
    for name, both in found["trainer"].items():
        if name in WORKLOADS:
            tree, rows = both["tree"], both["rows"]
            assert tree["computed"] <= rows["computed"] < tree["tokens"] == rows["tokens"]
            assert (tree["computed"] < rows["computed"]) == (name != "plain")
            assert tree["loss"] == pytest.approx(rows["loss"], abs=1e-5)
            assert tree["grad_norm"] == pytest.approx(rows["grad_norm"], rel=1e-3)
    assert found["parameters"] == SHAPES["tiny"].parameters
    for line in (
        "tiny: 0.000 B parameters",
        "engine   12 tokens in, 5 out",
        "trainer  turns: 8 sessions",
    ):
        assert line in said


def test_steps_in_bfloat16_report_their_time_and_work(no_group: None) -> None:
    """In bfloat16 over float32 weights, as training on a GPU computes."""
    shape, workload = SHAPES["tiny"], replace(WORKLOADS["plain"], groups=2, added=8, output=8)
    steps = Steps(shape, "cpu", compute=torch.bfloat16, checkpointing=True)
    found = steps.measure(workload, "rows", micro_batch_tokens=16, rounds=1, peak_tflops=1.0)
    # Of each row the last token is not computed: nothing follows it.
    assert (found.tokens, found.computed, found.peak_gb) == (32, 30, 0.0)
    assert found.mfu == pytest.approx(found.tflops)
    # 3 x (all matrices once for each token, the head for half of them, and attention).
    work = 3 * shape.forward_flops(30, 2 * 15 * 16 / 2, 16)
    assert found.tflops == pytest.approx(work / found.seconds / 1e12)
    assert found.effective_mfu is not None and found.effective_mfu > found.tflops
    assert steps.gather().gb_per_second > 0
