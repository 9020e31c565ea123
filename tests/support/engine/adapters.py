"""LoRA adapters that peft writes, and what peft, or plain sums, make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(model: Path, folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """An adapter that changes the model's answers; ``config``: of peft's `LoraConfig`."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": list(ALL)} | config
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def with_settings(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of an adapter whose `adapter_config.json` has other values."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def by_peft(model: Path, folder: Path) -> Any:
    """The adapted model as peft computes it, in float32."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).eval()


def merged(model: Path, folder: Path, scaling: float) -> Any:
    """The model with ``W + scaling B A``, added up here in float64."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")].double()
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = plain.get_submodule(layer).weight
            weight.data = (weight.double() + scaling * b @ a.double()).float()
    return plain
