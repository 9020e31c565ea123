"""One rank's proxy: records model calls, keeps sessions and rewards, hands out trajectories."""
