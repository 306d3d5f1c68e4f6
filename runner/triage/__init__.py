"""What is known about an incident before the agent starts, and how that becomes a part of its prompt. Pure."""
