"""Replay of anybody's rollouts, and why what remains remains: read `causes` first."""
