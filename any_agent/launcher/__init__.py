"""Starting and watching the processes of one node."""

from any_agent.launcher.node import Node, NodeOptions

__all__ = ["Node", "NodeOptions"]
