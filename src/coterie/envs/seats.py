"""What the games of a tool and a planner have in common: who drafts, and who of them sees the map."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from coterie.env import EnvOptions

TOOL, PLANNER = "tool", "planner"
_OWN_DRAFT = "planner[1]"
"""A planner's own draft is asked of a seat of its own: its answers and its drafts are no peers."""


class SeatOptions(EnvOptions):
    """Options of a game in which a tool drafts and a planner decides."""

    REWARDS: ClassVar[tuple[str, ...]] = ("reward", "solve_bonus", "format_reward")

    knowledge: Literal["shared", "split"] = "shared"
    """``split``: in a team only the tool sees the map; the planner sees drafts and what became of them."""
    rehearse: bool = False
    """A planner that plays alone first drafts an answer, which is simulated, and sees where it leads."""

    @model_validator(mode="after")
    def _rehearses_alone(self) -> SeatOptions:
        if self.rehearse and self.has_tool:
            raise ValueError('rehearse is for a planner that plays alone: set roles = ["planner"], or remove it')
        return self

    @property
    def has_tool(self) -> bool:
        """Whether a tool plays."""
        return self.roles is None or TOOL in self.roles

    @property
    def blind_planner(self) -> bool:
        """Whether the planner does not see the map. Alone it sees what both would."""
        return self.knowledge != "shared" and self.has_tool

    def drafting_seats(self, tools: int = 1) -> tuple[str, ...]:
        """Return the seats that draft in every round, before the planner answers."""
        if self.has_tool:
            return (TOOL,) if tools == 1 else tuple(f"{TOOL}[{seat}]" for seat in range(tools))
        return (_OWN_DRAFT,) if self.rehearse else ()

    def who(self, texts: Mapping[str, str], seat: str, drafted: bool) -> str:
        """Return which of the texts tells a seat who it is: tool, planner, blind, alone or drafting."""
        if not self.has_tool:
            return texts["drafting" if self.rehearse and not drafted else "alone"]
        if seat != PLANNER:
            return texts["tool"]
        return texts["blind" if self.blind_planner else "planner"]
