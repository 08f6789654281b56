"""The same run in many processes, on Ray. Only behind ``entry``, its door, Ray is imported."""
