"""Throughput that the papers state, for launch/benchmark.py."""

# arXiv:2410.17980, Section 4: billions of tokens per day on 8 H100s, a model of 1B parameters in dolomite-engine. Softmax
# is FlashAttention-2. No figure is given for 3B.
PUBLISHED = {"1b_softmax": 19.5, "1b_sb": 16.27}
