"""The same run in many processes, on Ray. ``entry`` is the door; Ray is imported only behind it, by ``actors`` and ``start``."""
