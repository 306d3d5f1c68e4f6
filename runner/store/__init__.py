"""Stores of events: SQLite for real, memory for tests; one conformance suite for both."""
