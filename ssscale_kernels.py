"""Makes the folder kernels/ the package ssscale_kernels in a checkout; in an installed wheel the folder has that name itself.

A package `kernels` of our own would hide Hugging Face's, which transformers looks for. The folder has no __init__.py for the
same reason: where both are on the path, theirs is found.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent / "kernels")]
