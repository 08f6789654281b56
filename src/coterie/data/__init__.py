"""Data sets of problems: read from published files, or made on the spot."""
