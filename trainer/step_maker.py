"""One train step, made from a batch as its manifest says: for the first time, or again."""

from __future__ import annotations

import logging
from functools import partial

from any_agent.config import Config
from any_agent.errors import TrainingError
from trainer.batch import Group, TrainingBatch, training_batch, versions_in
from trainer.from_config import loss_config, require_algorithm, step_settings
from trainer.manifests import Manifest, ManifestStore
from trainer.policy import Policy, StepResult
from trainer.publisher import WeightVersions
from trainer.reference import reference_logprobs
from trainer.run_checkpoints import RunCheckpoints
from trainer.updates import StepConfig

log = logging.getLogger(__name__)

_MAX_FAILED_STEPS = 5


class StepMaker:
    """Makes the steps of one run; raises ConfigError for an unknown algorithm."""

    def __init__(
        self, config: Config, manifests: ManifestStore, checkpoints: RunCheckpoints
    ) -> None:
        require_algorithm(config.train)
        self._config = config
        self._manifests = manifests
        self._checkpoints = checkpoints
        self.last_step = config.train.steps
        """The step that training ends with at the latest."""
        self._failed_steps = 0

    def manifest(
        self, policy: Policy, groups: list[Group], versions: WeightVersions, positions: list[int]
    ) -> Manifest:
        """Return the next step's manifest, as far as it is known before the batch is made.

        ``positions`` are the items of the dataset that the groups finish.
        """
        c, step = self._config, policy.steps + 1
        return Manifest(
            step=step,
            groups=[[session.session_id for session in group] for group in groups],
            trained=[],
            rejected={},
            tokens=[],
            versions=dict(versions.steps_of(versions_in(groups))),
            eta=c.rollout.eta,
            settings=step_settings(c.train, step, self.last_step),
            positions=positions,
            frozen=dict(self._checkpoints.frozen),
            pass_tokens=policy.runner.chosen,
            origin=self._checkpoints.origin,
        )

    def batch(self, policy: Policy, groups: list[Group], taken: Manifest) -> TrainingBatch:
        """Return the batch of these groups, masked and scored as the manifest says, and prepare the
        policy for the step."""
        c = self._config.train.model_copy(update=taken.settings)
        policy.runner.choose_as(taken.pass_tokens)
        self._checkpoints.load_frozen(policy, c.frozen_models, taken.frozen)
        return training_batch(
            groups,
            c,
            step=taken.step - 1,
            eta=taken.eta,
            step_of_version=taken.versions,
            temperature=self._config.sampling.temperature,
            reference=partial(reference_logprobs, policy, token_budget=c.micro_batch_tokens),
            misfit=policy.runner.misfit,
        )

    def optimize(self, policy: Policy, batch: TrainingBatch, taken: Manifest) -> StepResult | None:
        """Make one train step; None if there is nothing to train on, or it is not finite."""
        if not batch.rows:
            return None
        c = self._config.train.model_copy(update=taken.settings)
        try:
            result = policy.train(
                batch.rows,
                c.micro_batch_tokens,
                loss_config(c),
                StepConfig(c.epochs_per_batch, c.lr, c.betas, c.weight_decay, c.grad_clip),
                batch.minibatches,
            )
        except FloatingPointError as error:
            # No step was made, so a restart must repeat none.
            self._manifests.remove(taken.step)
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise TrainingError(
                    f"{self._failed_steps} consecutive steps were not finite, the last: {error}; "
                    "lower train.lr, or check the rewards in metrics.jsonl"
                ) from error
            log.error("a batch is skipped and the weights are unchanged: %s", error)
            batch.rejected |= dict.fromkeys(batch.trained, "not_finite")
            batch.trained = []
            return None
        except Exception:
            log.error(
                "step %d failed, and every start repeats it from %s: if memory ran out, here or in "
                "another training process, lower train.micro_batch_tokens; to skip the step, "
                "remove that file and any later ones",
                *(taken.step, self._manifests.path(taken.step)),
            )
            raise
        self._failed_steps = 0
        return result
