"""Programs as agents: `any-agent run` starts one process for each run."""
