"""Safetensors files as such: headers, and tables of what they hold."""
