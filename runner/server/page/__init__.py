"""Pages for a browser. They show what the routes answer to whoever has logged in, so that both allow the same."""
