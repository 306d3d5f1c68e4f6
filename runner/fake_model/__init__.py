"""The scripted model behind a rehearsal."""
