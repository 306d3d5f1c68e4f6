"""Hosted servers of the Model Context Protocol: in sandboxes of their own, behind a bridge that many clients share."""
