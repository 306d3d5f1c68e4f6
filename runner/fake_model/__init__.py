"""The scripted model of a rehearsal."""
