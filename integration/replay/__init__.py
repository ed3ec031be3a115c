"""Closed-loop replay of recorded multi-turn traces."""
