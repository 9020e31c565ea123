"""The loader of causal language models; it refuses those that the loop cannot run exactly."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from any_agent.engine.embedded.kv_cache import KVCache
from any_agent.engine.embedded.stops import Decode
from any_agent.engine.weight_serialization import align
from any_agent.errors import StartupError

_PARAMETERS = ("input_ids", "position_ids", "attention_mask", "past_key_values", "logits_to_keep")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode with the properties that serving needs."""

    model: Any
    tokenizer: Any
    path: str
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    cache_layers: int

    def new_cache(self, max_tokens: int | None = None) -> KVCache:
        return KVCache(self.cache_layers, self.dtype, self.device, max_tokens)

    def decoder(self, *, skip_special_tokens: bool) -> Decode:
        """Return a function from ids to text; ids that the tokenizer does not know give no text."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is not None:
            return lambda ids: core.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return lambda ids: self.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def load_model(
    path: str, *, device: str = "cpu", dtype: str = "auto", context_length: int | None = None
) -> LoadedModel:
    """Load a model from a directory or a hub name; StartupError for one that cannot be served.

    ``device`` auto takes a GPU if there is one.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,
            attn_implementation="sdpa",
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as exc:
        raise StartupError(f"cannot load {path}: {exc}") from exc
    model.eval().requires_grad_(False).to(device)
    align(model)
    config = model.config.get_text_config(decoder=True)
    longest = int(config.max_position_embeddings)
    if context_length is not None and not 2 <= context_length <= longest:
        raise StartupError(
            f"the context length must be 2 .. {longest} for this model, not {context_length}"
        )
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        path=str(Path(path).resolve()) if Path(path).is_dir() else path,
        device=torch.device(device),
        dtype=model.dtype,
        vocab_size=int(model.get_input_embeddings().num_embeddings),
        context_length=context_length or longest,
        eos_ids=_eos_ids(model, tokenizer),
        cache_layers=_plain_cache_layers(model),
    )
    _check_rope(config, loaded.context_length)
    _check_exact(loaded)
    return loaded


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = found if isinstance(found, list) else [found]
    return frozenset(i for i in (*ids, tokenizer.eos_token_id) if i is not None)


def _plain_cache_layers(model: Any) -> int:
    """Return the number of layers; StartupError for a cache other than growing keys and values."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    name = type(model).__name__
    missing = [p for p in _PARAMETERS if p not in inspect.signature(model.forward).parameters]
    if missing:
        raise StartupError(f"{name} cannot be served: its forward lacks {', '.join(missing)}")
    if model.config.is_encoder_decoder:
        raise StartupError(f"{name} cannot be served: it is an encoder-decoder")
    layers = DynamicCache(config=model.config).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other or not layers:
        raise StartupError(
            f"{name} cannot be served: the embedded engine supports plain key/value caches only, "
            f"not {', '.join(other) or 'an unknown one'} (sliding windows, recurrent states)"
        )
    return len(layers)


def _check_rope(config: Any, context_length: int) -> None:
    """Raise StartupError for a rotary scaling that depends on the batch's longest row."""
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if rope.get("rope_type") in ("dynamic", "longrope") and context_length > original:
        raise StartupError(
            f"rope type {rope['rope_type']!r} depends on the batch's longest row beyond {original} "
            f"tokens; start with --context-length {original}"
        )


def _check_exact(loaded: LoadedModel) -> None:
    """Compare two ragged rows in slots with a fresh pass over each; StartupError if they differ."""
    n = min(loaded.vocab_size, 97)
    length = max(1, min(5, loaded.context_length - 2))
    rows = [[(7 * i + 3) % n for i in range(length)], [5 % n]]
    following = [[11 % n], [13 % n]]
    cache, model = loaded.new_cache(), loaded.model

    def forward(ids: list[list[int]], **more: Any) -> torch.Tensor:
        tensor = torch.tensor(ids, device=loaded.device)
        return torch.log_softmax(model(input_ids=tensor, **more).logits.float(), dim=-1)

    with torch.inference_mode():
        lengths = [len(r) for r in rows]
        cache.begin_prefill(lengths)
        padded = [r + [0] * (max(lengths) - len(r)) for r in rows]
        places = torch.arange(max(lengths), device=loaded.device).expand(2, -1)
        forward(padded, position_ids=places, past_key_values=cache.kv, use_cache=True)
        cache.end_prefill(lengths)
        ours = forward(
            following,
            position_ids=cache.length_index[:, None],
            attention_mask=cache.begin_decode(),
            past_key_values=cache.kv,
            use_cache=True,
        )[:, -1]
        whole = [row + after for row, after in zip(rows, following, strict=True)]
        fresh = [forward([ids], use_cache=False)[0, -1] for ids in whole]
    worst = (ours.exp() - torch.stack(fresh).exp()).abs().max().item()
    if not worst < (1e-4 if loaded.dtype == torch.float32 else 0.1):
        raise StartupError(
            f"{type(model).__name__} cannot be served: stepping it in a batch differs from a fresh "
            f"pass by {worst:.2g} in probability"
        )
