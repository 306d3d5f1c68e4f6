"""How a double speaks each API: what tools a request offers, and an answer in the API's own shape."""
