"""What operators mean: terms with one normal form for all spellings of the same arithmetic."""
