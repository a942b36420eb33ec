"""Which sampling rules does an engine follow? Named probes, what each profile says to them, and what a target did."""
