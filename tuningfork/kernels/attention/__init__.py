"""Attention of a fork layout: a plain form and a Triton form behind the same two functions.

Each form is a class with

    prepare(layout) -> instance             once per pack, before the model runs
    attend(query, key, value, ...) -> out   once per layer, inside the compiled block

`query` is [T, H, d]; `key` and `value` are [T, H_kv, d] with H a multiple of H_kv; the result is [T, H, d].
"""
