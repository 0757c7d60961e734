"""The load generator of `weir bench` and `make bench-load`: an open loop, so that a slow server is not asked less."""
