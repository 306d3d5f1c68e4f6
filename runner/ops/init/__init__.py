"""First manifests for a repository, and the copy of the quickstart."""
