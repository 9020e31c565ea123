"""Other ways to make the trainer's step: padded rows by plain transformers, and TRL's GRPO.

Each makes the same optimizer step as `trainer.policy.Policy.train` with its default settings, on
the same rows: the clipped policy loss, summed over all trained tokens and divided by their number,
with importance weights capped at 5, the global norm clipped at 1, and AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.peers.trl_trainer import Completions, trl_trainer
from benchmarks.training_rows import length
from trainer.rows import Row

CAP = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step's loss, its gradient's global norm before clipping, and the tokens computed, which
    only we count."""

    loss: float
    norm: float
    computed: int = 0


class Peer:
    """A model and its AdamW; ``size`` bounds the padded tokens of a pass."""

    def __init__(self, model: Any, lr: float) -> None:
        self.model = model
        self.size = 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)

    def losses(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        """Yield each pass's share of the loss."""
        raise NotImplementedError

    def passes(self, rows: Sequence[Row]) -> list[int]:
        """Return the padded tokens of each pass."""
        raise NotImplementedError

    def step(self, rows: Sequence[Row]) -> Step:
        """Make one optimizer step."""
        total = 0.0
        for loss in self.losses(rows):
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Step(total, float(norm))


class Bucketed(Peer):
    """Rows of like length, padded on the right; the head runs where a token is trained."""

    def losses(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        count = sum(int(row["loss_mask"].sum()) for row in rows)
        for part in self._parts(rows):
            ids, mask = (_padded(part, key) for key in ("input_ids", "loss_mask"))
            logits = self._logits(ids, mask)
            places, positions = mask.nonzero(as_tuple=True)
            labels = ids[places, positions].long()
            logprobs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
            behaviour = _padded(part, "logprobs")[places, positions]
            advantages = torch.stack([row["advantages"] for row in part])[places]
            fixed = logprobs.detach()
            weight = torch.exp(fixed - behaviour).clamp(max=CAP)
            ratio = torch.exp(logprobs - fixed)
            clipped = ratio.clamp(0.8, 1.28)
            yield -(weight * torch.min(ratio * advantages, clipped * advantages)).sum() / count

    def passes(self, rows: Sequence[Row]) -> list[int]:
        return [len(part) * length(part[0]) for part in self._parts(rows)]

    def _parts(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Divide the rows, longest first."""
        parts: list[list[Row]] = []
        for row in sorted(rows, key=length, reverse=True):
            if parts and (len(parts[-1]) + 1) * length(parts[-1][0]) <= self.size:
                parts[-1].append(row)
            else:
                parts.append([row])
        return parts

    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the logits [n, vocab] that predict the trained tokens."""
        # Padding on the right needs no mask under causal attention: no trained token sees it.
        hidden = self.model.base_model(input_ids=ids.long(), use_cache=False).last_hidden_state
        places, positions = mask.nonzero(as_tuple=True)
        logits: Tensor = self.model.get_output_embeddings()(hidden[places, positions - 1])
        return logits


class FullLogits(Bucketed):
    """The same with logits of every token, as transformers' ``model(...)`` returns them."""

    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.model(input_ids=ids.long(), use_cache=False).logits
        places, positions = mask.nonzero(as_tuple=True)
        table: Tensor = logits.log_softmax(-1)[places, positions - 1]
        return table


def _padded(rows: Sequence[Row], key: str) -> Tensor:
    return pad_sequence([row[key] for row in rows], batch_first=True)


class Trl(Peer):
    """TRL's GRPOTrainer made without its constructor: its own padding, scoring pass and loss.

    ``loss_type="dapo"`` and vLLM's correction by truncated weights of tokens are our loss. For that
    correction TRL computes the log-probabilities of the whole batch once more, without gradient.
    It pads every prompt of a step to the longest, on the left, and every output on the right. A
    row's prompt ends where its first trained token begins; what is not trained after that is
    masked as TRL masks tools' tokens.
    """

    def __init__(self, model: Any, lr: float) -> None:
        from trl.trainer.utils import add_fused_lm_head

        super().__init__(model, lr)
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        model.train()

    def passes(self, rows: Sequence[Row]) -> list[int]:
        prompts = [_prompt(row) for row in rows]
        wide = max(prompts) + max(length(row) - p for row, p in zip(rows, prompts, strict=True))
        each = max(1, self.size // wide)
        return [min(each, len(rows) - k) * wide for k in range(0, len(rows), each)]

    def losses(self, rows: Sequence[Row]) -> Iterator[Tensor]:
        passes = self.passes(rows)
        each = passes[0] * len(rows) // sum(passes)
        trainer = _trl_trainer(self.model, rows, each)
        scored = trainer._generate_and_score_completions([{"prompt": ""} for _ in rows])
        # The rows of a session share its advantage, which TRL does not know: it has one reward for
        # each row.
        scored["advantages"] = torch.stack([row["advantages"] for row in rows])
        for k in range(0, len(rows), each):
            part = {
                key: value[k : k + each] if value.ndim else value for key, value in scored.items()
            }
            yield trainer._compute_loss(self.model, part)


def _prompt(row: Row) -> int:
    """Return the number of tokens before the first trained one."""
    return int(row["loss_mask"].argmax())


def _trl_trainer(model: Any, rows: Sequence[Row], each: int) -> Any:
    prompts = [_prompt(row) for row in rows]

    def parts(key: str) -> list[tuple[list[Any], list[Any]]]:
        given = [row[key].tolist() for row in rows]
        return [(one[:p], one[p:]) for one, p in zip(given, prompts, strict=True)]

    given = Completions(
        prompts=[prompt for prompt, _ in parts("input_ids")],
        outputs=[output for _, output in parts("input_ids")],
        own=[output for _, output in parts("loss_mask")],
        behaviour=[output for _, output in parts("logprobs")],
        rewards=torch.stack([row["rewards"] for row in rows]),
    )
    return trl_trainer(
        model, given, group=len(rows), each=each, vllm_importance_sampling_clip_max=CAP
    )
