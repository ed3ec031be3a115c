"""``vamp doctor``: facts about a machine (``probe``), and what they mean for VAMP (``checks``)."""
