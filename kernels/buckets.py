"""The sizes to which boundaries are padded, so that a few cuDNN plans serve batches of any number of documents."""


def bucket(boundaries: int) -> int:
    """The size to which [num_documents + 1] boundaries are padded with empty documents: 16, 20, 24, 28, 32, 40, 48, ...

    Four sizes per octave are few enough to build one cuDNN plan for each. At powers of two alone, the thread blocks
    of empty documents cost up to 5 % of attention's time.
    """
    step = max(4, (1 << (boundaries - 1).bit_length()) // 8)
    return max(16, -(-boundaries // step) * step)
