"""The public APIs' shapes over `any_agent.completions`."""
