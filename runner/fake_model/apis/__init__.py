"""The fake model's side of each API: which tools a request offers, and an answer in the API's own shape."""
