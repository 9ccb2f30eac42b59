"""The table of formats: what is read, what is written, what proves it."""
