"""From a request and a session's interaction tree to recorded completions."""
