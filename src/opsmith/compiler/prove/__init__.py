"""Whether what runs a site is right."""
