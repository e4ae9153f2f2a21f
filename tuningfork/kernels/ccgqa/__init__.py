"""Queries, keys and values of compressed convolutional grouped-query attention (CCGQA; Figliolia et al. 2025,
arXiv:2510.04476), along a layout's paths: a plain form and a Triton form behind the same functions.

Each form is a class with

    prepare(layout) -> instance                                once per pack, before the model runs
    query_key(x, filters, temperature, heads) -> query, key    once per layer, inside the compiled block
    values(x, now) -> values

Attention itself is the op `attention`, which takes what comes out of these, rotated.
"""
