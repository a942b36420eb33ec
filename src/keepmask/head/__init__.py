"""Logits at (row, id): products of hidden states and head rows, for the engine and for replay."""
