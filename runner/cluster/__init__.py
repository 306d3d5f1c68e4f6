"""Kubernetes clusters: kubeconfigs, credentials, and a proxy of their API that only reads."""
