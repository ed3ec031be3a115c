"""Cost model and policy: pure functions from a state to a decision."""
