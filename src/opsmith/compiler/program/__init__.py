"""A captured graph at work: studied once, then run as a program."""
