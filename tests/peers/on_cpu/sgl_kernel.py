"""SGLang's kernel package where there is none for CPUs: the one helper its PyTorch paths call, and names that raise.

Nothing of it takes part in sampling.
"""


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Write each request's new cache locations into its row of the table, one request after the other."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        locations = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = locations.to(req_to_token.dtype)
        taken += last - first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: has no stand-in for CPUs")

    return missing
