"""Coterie trains teams of language-model agents with on-policy reinforcement learning.

What an environment is written with, and ``load``, which plays with a trained team. Importing it loads no torch.
"""

from coterie.api import TrainedTeam, load
from coterie.env import Env, EnvOptions, Team
from coterie.machine import limit_kernel_caches
from coterie.types import Episode, Outcome, Reward, Scored, Task, assistant, system, user

__all__ = [
    "Env",
    "EnvOptions",
    "Episode",
    "Outcome",
    "Reward",
    "Scored",
    "Task",
    "Team",
    "TrainedTeam",
    "assistant",
    "load",
    "system",
    "user",
]

limit_kernel_caches()  # before torch is loaded, which reads it once
