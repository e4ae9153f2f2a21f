"""Native sparse attention (Yuan et al. 2025, arXiv:2502.11089): a token reads compressed blocks of its path, a few
blocks that it chooses by them, and a window.

All of it lies on grids of *positions* (`Grid`), so no cut of a path moves a block, and a block that a cut crosses is
made once for each path that goes on from there (`_blocks.py`). Each form is a class with

    prepare(layout, grid) -> instance                           once per pack, before the model runs
    first_positions                                             [E], where the compressed blocks of the pack begin
    blocks(rows) -> [E, l, G, w]                                the rows of each block, for a learned compression
    mean(rows) -> [E, G, w]                                     their mean, for one that learns nothing
    compressed(query, keys, values, scale=, choice=) -> out, chosen
    selected(query, key, value, chosen, scale=) -> out

and all but the first once per layer. The window is attention as everybody's (kernels/attention), and the gates that
weigh the three are the layer's. Query heads 0 .. h-1 read group 0 of G, and so on. A row of position t, 0-based, reads

    compressed   block i, of positions [i d, i d + l), if it is complete: i d + l <= t + 1; zero where there is none
    chosen       of blocks j = 0 .. t // l', of positions [j l', (j + 1) l'): see `Choice`
    selected     the positions up to t in its chosen blocks

A block j is chosen by what compressed attention gives to what lies in it. With p the softmax of one head, each p[i]
counts for a block j as often as strides d of block i lie in it, and heads of a group decide together (equations 9, 10;
9 is printed for indices that count from 1):

    S[j] = sum over a of the group, m < l'/d, u < l/d of p_a[(l'/d) (j + 1) - 1 - m - u]

No gradient flows through a choice. It is made in float32 at least, and equal scores go to the lower block.
"""
