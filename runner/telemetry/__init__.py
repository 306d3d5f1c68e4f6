"""A sink that tells a collector of OpenTelemetry of runs, off the one event stream, and stops or slows nothing."""
