"""Executes plans: moves bytes from file ranges to file ranges. Knows no format and no tensor names."""
