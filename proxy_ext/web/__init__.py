"""HTTP mechanics of a rank: limits, permissions, quotas, draining, exchanges."""
