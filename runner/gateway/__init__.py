"""The model gateway: keys, budgets and models are enforced here, outside of the workspace."""
