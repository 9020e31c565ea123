"""Opening sessions: slots, groups, what tenants may use."""
