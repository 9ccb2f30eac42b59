"""torch's zip container: members and their bytes, read without unpacking and laid out before writing."""
