"""HTTP face: requests to operations and back. What an operation does is in ``ops``; nothing of it is decided here."""
