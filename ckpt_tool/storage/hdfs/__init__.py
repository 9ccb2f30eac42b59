"""HDFS, by a client that speaks its protocol: a store to read from and a place to write to."""
