"""A model's forward over a paged cache: batches, attention, decoder layers, linear layers."""
