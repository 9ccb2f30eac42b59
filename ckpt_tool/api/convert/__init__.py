"""Conversions: a source, a target layout and the plan between them; reshard, export and edit are made of these."""
