"""Building blocks of sandboxes that providers share: processes, mounts, limits, bubblewrap, containers, the guest."""
