"""The engine's benchmark: throughput, latency, memory, where the time goes, and the same work done by other engines."""
