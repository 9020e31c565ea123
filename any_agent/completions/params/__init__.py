"""The parameters of all APIs of model calls, in three classes, from one table."""
