"""The rows of `/v1/responses` in the table of parameters."""

from __future__ import annotations

from any_agent.completions.params.rows import Parameter

RESPONSES_ROWS: tuple[Parameter, ...] = ()
