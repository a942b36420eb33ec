"""Clients of servers that roll out: this package's own, and vLLM's, over HTTP."""
