"""Per-row log-probs of picked tokens from logits, and their gradient: a plain form and a Triton form.

Both take raw logits `Z` [R, V] and apply the model's logit transform, z -> cap·tanh(scale·z / cap), inside.
"""
