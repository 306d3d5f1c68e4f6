"""Sandbox providers: one module each, whose file name is its registration. Modules with ``_`` are what they share."""
