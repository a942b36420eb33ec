"""The sampler on CUDA devices: candidates first, in Triton kernels."""
