"""HTTP: vLLM's token-in-token-out and OpenAI routes, SGLang's /generate, and RL control. docs/server.md shows each."""
