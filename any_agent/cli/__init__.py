"""The command `any-agent`: one module for each subcommand."""

from any_agent.cli.main import main as main
from any_agent.cli.serve import run_service as run_service
