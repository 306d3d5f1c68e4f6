"""Where events are kept: SQLite for real, memory for tests; one conformance suite for both."""
