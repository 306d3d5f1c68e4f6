"""``runner triage``: manifests from an incident, and the checks before it."""
