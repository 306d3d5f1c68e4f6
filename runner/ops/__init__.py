"""The composition root: the only place where the engine meets adapters."""
