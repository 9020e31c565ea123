"""The folder of a run: its layout, its registry of live parts."""

from any_agent.rundir.layout import RunDir as RunDir
