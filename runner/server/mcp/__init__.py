"""The face of the server for MCP clients: routes as tools, over standard streams and HTTP."""
