"""`any-agent export`: journals and archives as JSON lines, without the service, without torch."""
