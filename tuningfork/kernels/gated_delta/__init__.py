"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): a linear recurrence along the paths of a pack.

Of each value head and row: query q and key k [dk], value v [dv], log of the decay g and rate b. The state S [dk, dv] is
zero before a path's first row, and each row does

    S <- e^g S;  u = b (v - S^T k);  S <- S + k u^T;  o = S^T q

Each form is a class with

    prepare(layout) -> instance                     once per pack, before the model runs
    scan(query, key, value, decay, beta) -> out     once per layer, inside the compiled block

Both compute it in chunks of CHUNK positions (`_chunks.py`). Within a chunk, with γ the running sum of g and
D_ij = e^(γ_i - γ_j) for i >= j, else 0:

    A = b K K^T ⊙ D, strictly lower;  [u | w] = (I + A)^-1 [b V | b e^γ K];  v' = u - w S
    O = e^γ Q S + (Q K^T ⊙ D) v';     S <- e^(γ of the last) S + (e^(γ of the last - γ) K)^T v'

A row that a chunk lacks is zero in all of these, and changes no state.
"""
