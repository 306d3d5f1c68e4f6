"""This host: what it can do, its keys, its image, its store."""
