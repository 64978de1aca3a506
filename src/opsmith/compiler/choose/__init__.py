"""Which implementation runs a site."""
