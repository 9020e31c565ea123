"""Authorization: stored keys, scopes, the audit log."""
