"""`any-agent export` writes journals and archives as JSON lines, without the service or torch."""
