"""Context of an incident before the agent starts, and the prompt that is made of it. Pure."""
