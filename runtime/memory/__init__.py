"""Pages, the addresses they lie behind, and the moves between expert weights and KV cache."""
