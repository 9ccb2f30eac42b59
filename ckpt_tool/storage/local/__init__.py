"""Files of this machine: the store that reads them, and the target that becomes a folder in one step."""
