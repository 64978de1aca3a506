"""From a prototype to an operator: what a person writes is a signature and a formula; the rest is generated."""
