"""The checks that every plug-in passes; each module can also be imported whole by a test module of another suite."""
