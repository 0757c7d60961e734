"""Token buckets and concurrency leases in Redis: Lua beside the typed Python that binds it."""
