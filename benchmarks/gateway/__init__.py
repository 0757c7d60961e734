"""What the gateway costs a request, beside LiteLLM's proxy: see __main__.py."""
