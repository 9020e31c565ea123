"""The process and the operating system: logs, metrics, files, signals, event loops, workers."""
