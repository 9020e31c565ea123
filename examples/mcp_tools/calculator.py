"""An ordinary MCP server with tools; it contains nothing for agents or for training."""

from mcp.server import MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


if __name__ == "__main__":
    server.run("stdio")
