"""Sizes to which what differs from batch to batch is padded, so that few kernels and plans serve all."""


def bucket(boundaries: int) -> int:
    """The size to which [num_documents + 1] boundaries are padded (with empty documents): 16, 20, 24, 28, 32, 40, 48, ...

    Four sizes an octave: few enough for one cuDNN plan each; thread blocks of empty documents cost up to 5 % at powers of two.
    """
    step = max(4, (1 << (boundaries - 1).bit_length()) // 8)
    return max(16, -(-boundaries // step) * step)
