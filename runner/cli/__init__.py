"""Command line: ``main`` and one file a verb. Verbs import what they need when they run, not before."""
