"""Exact and estimated token counts; what a sample costs before a pixel is decoded."""
