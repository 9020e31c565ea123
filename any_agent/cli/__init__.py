"""The command `any-agent`: one module for each subcommand."""

from any_agent.cli.main import main, run_service

__all__ = ["main", "run_service"]
