"""The bare engine against its peers: same weights, prompts, machine and call. Run with `make bench-engine`."""
