"""Values, errors and small tools that every room may use."""
