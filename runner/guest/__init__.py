"""The exec channel into a workspace: framing, the host's client, and the guest program in C."""
