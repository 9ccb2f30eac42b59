"""S3 and what speaks like it: credentials, signed requests, a store to read from and a place to write to."""
