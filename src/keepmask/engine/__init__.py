"""The rollout engine: one synchronous `Engine.step()` over token ids."""
