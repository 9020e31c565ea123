"""Rewards: functions, graders, returned values, statistics."""
