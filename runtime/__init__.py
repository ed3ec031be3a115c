"""Memory, cost model and policy of VAMP. Knows nothing of vLLM."""
