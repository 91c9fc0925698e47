"""How many elements DeepSpeed and `parallel.overlap` exchange at a time. Imports no torch, so that estimates can use it."""

REDUCE_BUCKET = 500_000_000  # gradient elements that DeepSpeed's ZeRO 2 and 3 collect before they reduce them


def overlap_bucket(replicas: int) -> int:
    """Returns the number of elements at which a bucket of `parallel.overlap` ends (ssscale/engine/exchange.py).

    Of larger buckets, more would be left to exchange when backward ends. Smaller ones would not use a fast link: 2^25 are
    128 MiB of gradients. A ring over many ranks sends a bucket in as many pieces, which have at least 2^17 elements.
    """
    return max(2**25, 2**17 * replicas)
