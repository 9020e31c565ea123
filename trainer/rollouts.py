"""What runs a trainer's workflows: the executor, on the engines of its service."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from any_agent import load_hf_tokenizer
from any_agent.auth.access import signer_of
from any_agent.config import Config
from any_agent.config.script import sampling_of
from any_agent.engine import EnginePool
from any_agent.rollout import WorkflowExecutor
from any_agent.rundir.layout import RunDir
from any_agent.workflow.dump import TrajectoryDump
from any_agent.workflow.openai_proxy import AgentService
from trainer.service import LocalService
from trainer.weight_folders import tokenizer_of


def agent_service(c: Config, run_dir: RunDir, service: LocalService) -> AgentService:
    """Where agents' calls go, with the run's own key, also after its secret was changed."""
    signer = signer_of(run_dir)
    return AgentService(
        service.local_url,
        lambda: signer.run_key,
        mode=c.rollout.agent.mode,
        export_style=c.rollout.agent.export_style,
        discount=c.train.discount,
        max_workers=c.rollout.agent.max_workers,
        timeout=c.rollout.agent.timeout,
    )


def workflow_executor(c: Config, service: LocalService) -> WorkflowExecutor:
    """Of workflows that are resolved. It is not started yet; ``service`` is."""
    tokenizer = load_hf_tokenizer(str(tokenizer_of(c.model.path)))
    pool = EnginePool(
        service.engine_urls,
        kind=c.engine.kind,
        decode=tokenizer.decode,
        update_mode=c.engine.update_mode,
        update_wait=c.engine.update_wait,
        request_timeout=c.engine.request_timeout,
    )
    return WorkflowExecutor(
        pool,
        c.rollout,
        sampling=sampling_of(c),
        eval_sampling=sampling_of(c, c.eval.temperature),
        dump=TrajectoryDump.of(c, _dumped_by(c, tokenizer).decode),
        timeout=c.sessions.ttl,
        discount=c.train.discount,
        vocab_size=AutoConfig.from_pretrained(c.model.path).get_text_config().vocab_size,
    )


def _dumped_by(c: Config, tokenizer: Any) -> Any:
    """Return the tokenizer of dumped episodes; the model's own is there already."""
    path = c.rollout.tokenizer_path
    if not path or not c.rollout.dump_to_file:
        return tokenizer
    return load_hf_tokenizer(path)
