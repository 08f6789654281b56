"""The same run in many processes, on Ray. Nothing here is imported where ``hardware.backend`` is ``local``."""
