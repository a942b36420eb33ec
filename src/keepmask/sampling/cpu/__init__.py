"""The sampler on CPUs: candidates first, in compiled kernels."""
