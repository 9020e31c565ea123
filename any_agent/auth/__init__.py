"""Who may do what: stored keys, scopes, the audit log."""
