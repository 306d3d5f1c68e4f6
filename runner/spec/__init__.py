"""Documents to specs: references, defaults and precedence resolved, nothing left to look up. Pure."""
