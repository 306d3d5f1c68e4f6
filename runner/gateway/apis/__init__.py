"""The APIs of providers, pure: one module each, whose ``api`` is the registration."""
