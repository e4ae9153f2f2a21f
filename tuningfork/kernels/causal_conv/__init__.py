"""Depthwise causal convolution along a layout's paths: a plain form and a Triton form behind the same functions.

Each form is a class with

    prepare(layout) -> instance                           once per pack, before the model runs
    conv(x, weight, ...) -> out                           once per layer, inside the compiled block, or
    query_key_value(x, weight, heads) -> query, key, value

`x` is [T, C] and `weight` [C, W]: each channel is convolved by itself.
"""
