"""From text to documents: YAML with positions, defaults merged in, every error of every file in one report."""
