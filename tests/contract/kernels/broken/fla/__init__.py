"""A flash-linear-attention without the functions that layers call; transformers computes them itself then."""
