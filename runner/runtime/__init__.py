"""The parts that step kinds share: the run's context, commands, secrets, lease, scan and restore."""
