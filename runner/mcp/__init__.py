"""Servers of the Model Context Protocol as seen by their clients: the bridge to one, and the ways to reach it."""
