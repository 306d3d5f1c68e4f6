"""What a run leaves on disk for people and programs: its directory and the files in it."""
