"""What is particular to each provider's API, pure: one module each, and its ``api`` is the registration."""
