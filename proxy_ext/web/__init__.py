"""HTTP mechanics of a rank: permissions, quotas, draining, exchanges."""
