"""Runs: folders of saved steps, which of these are complete, and what killed saves left behind."""
