"""The form of structured outputs as bans: which tokens may come next so that the text can still have it."""
