"""What fsspec reaches, and what every client of remote storage needs: trying again, connections."""
