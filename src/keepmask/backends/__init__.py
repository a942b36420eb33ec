"""Other places that rollouts come from: this server and others over HTTP, vLLM, SGLang, Ray."""
