"""The ``ckpt`` command: arguments in, text or JSON out; every command is one call of the api and one rendering."""
