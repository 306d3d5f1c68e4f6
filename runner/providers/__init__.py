"""Sandbox providers: one module each, whose file name is its registration."""
