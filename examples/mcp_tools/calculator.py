"""A server of tools over MCP, as any other: it knows nothing of agents or of training."""

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
