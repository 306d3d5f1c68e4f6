"""Routes by what they are about. Each module has a table ``ROUTES``, and the values of its bodies and answers."""
