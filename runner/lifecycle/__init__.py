"""Pure rules about time and state; the moment is always an argument."""
