"""Where bytes live: stores to read from, targets to write to, and a store in memory that records every call."""
