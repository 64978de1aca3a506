"""The operator rope_custom; its card is in operator.py."""
