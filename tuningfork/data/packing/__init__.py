"""Token examples -> packs: which share one, and how one lies in tensors."""
