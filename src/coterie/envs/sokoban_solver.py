"""Distances, deadlocks and solutions of Sokoban positions.

A search goes from push to push: between pushes only the region the agent can walk in matters. Cells and sets of cells
are as in ``sokoban_rules``.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from coterie.envs.sokoban_rules import MOVES, Level, Position, cells, shifted

Push = tuple[int, str]
"""The cell of a box, and the move that pushes it."""

EXACT_BOXES = 2
EXACT_CELLS = 144
"""Up to this many boxes and cells of the rectangle (12 x 12), distances are exact and solutions shortest in moves."""
MAX_NODES = 40_000
"""Positions a search looks at before it gives up, on levels of up to four boxes: 2 to 5 seconds."""


def is_small(level: Level) -> bool:
    """Return whether distances on this level are exact and scripted solutions shortest."""
    return level.goals.bit_count() <= EXACT_BOXES and level.width * level.height <= EXACT_CELLS


@lru_cache(maxsize=4096)
def push_distances(level: Level) -> tuple[dict[int, int], ...]:
    """Return, per goal, cell -> fewest pushes a lone box needs from there to it, wherever the agent may stand."""
    found = []
    for goal in cells(level.goals):
        distances = {goal: 0}
        queue = deque([goal])
        while queue:
            cell = queue.popleft()
            for step in level.steps:
                box, agent = cell - step, cell - 2 * step
                on_board = 0 <= agent < level.width * level.height
                if on_board and box not in distances and not (level.walls >> box | level.walls >> agent) & 1:
                    distances[box] = distances[cell] + 1
                    queue.append(box)
        found.append(distances)
    return tuple(found)


@lru_cache(maxsize=4096)
def live_cells(level: Level) -> int:
    """Return the set of cells from which a lone box can reach some goal; on all others it is lost."""
    return sum(1 << cell for cell in set().union(*push_distances(level)))


def frozen_boxes(level: Level, boxes: int) -> int:
    """Return the boxes that can never move again on the way to a solution.

    Take all boxes as fixed and let go of those with a free axis, until none is left to let go. On a free axis no side
    is a wall or a fixed box, and not both sides are lost cells.
    """
    width, dead = level.width, ~live_cells(level)
    lost_across = dead << 1 & dead >> 1
    lost_along = dead << width & dead >> width
    fixed = boxes
    while True:
        solid = level.walls | fixed
        blocked = (solid << 1 | solid >> 1 | lost_across) & (solid << width | solid >> width | lost_along)
        if fixed & blocked == fixed:
            return fixed
        fixed &= blocked


def is_stuck(level: Level, boxes: int) -> bool:
    """Return whether some box off its goal is on a lost cell or frozen. False does not promise a solution."""
    return bool(boxes & ~live_cells(level) & ~level.goals or frozen_boxes(level, boxes) & ~level.goals)


@lru_cache(maxsize=1 << 16)
def assignment_distance(level: Level, boxes: int) -> int | None:
    """Return the fewest pushes if boxes did not hinder each other: the cheapest matching of boxes to goals.

    Never more than the true number; ``None`` where no matching exists. Shortest augmenting paths with potentials.
    """
    tables = push_distances(level)
    lost = 1 << 20
    costs = [[table.get(box, lost) for table in tables] for box in cells(boxes)]
    size = len(costs)
    row_price, column_price, owner = [0] * size, [0] * (size + 1), [-1] * (size + 1)
    for row in range(size):
        owner[size] = row
        column = size
        slack, came_from, seen = [lost * size] * size, [size] * size, [False] * (size + 1)
        while owner[column] >= 0:
            seen[column] = True
            at = owner[column]
            for j in range(size):
                cost = costs[at][j] - row_price[at] - column_price[j]
                if not seen[j] and cost < slack[j]:
                    slack[j], came_from[j] = cost, column
            nearest = min((j for j in range(size) if not seen[j]), key=slack.__getitem__)
            delta = slack[nearest]
            for j in range(size + 1):
                if seen[j]:
                    row_price[owner[j]] += delta
                    column_price[j] -= delta
                elif j < size:
                    slack[j] -= delta
            column = nearest
        while column != size:
            owner[column], column = owner[came_from[column]], came_from[column]
    total = sum(costs[owner[j]][j] for j in range(size))
    return total if total < lost else None


def pushes(level: Level, agent: int, boxes: int) -> tuple[int, list[tuple[int, Push]]]:
    """Return (lowest cell the agent can walk to, every push it can make with the number of steps walked before it).

    The lowest cell names the region: positions with equal boxes and region differ by walking only. Pushes of a box onto
    a lost cell are left out.
    """
    free = ~(level.walls | boxes)
    room = free & live_cells(level)
    pushable = [(move, step, shifted(room, -step) & boxes) for move, step in zip(MOVES, level.steps, strict=True)]
    found, reached, front, walked = [], 0, 1 << agent, 0
    while front:
        reached |= front
        for move, step, movable in pushable:
            found += [(walked, (box, move)) for box in cells(shifted(front, step) & movable)]
        around = front << 1 | front >> 1 | front << level.width | front >> level.width
        front = around & free & ~reached
        walked += 1
    return (reached & -reached).bit_length() - 1, found


@dataclass(frozen=True, slots=True)
class Search:
    """What a search found: the moves of a solution, or why there are none.

    ``unsolvable`` is proven; ``unknown`` means that the search gave up at its limit.
    """

    status: Literal["solved", "unsolvable", "unknown"]
    moves: str = ""
    pushes: int = 0


def search(start: Position, count: Literal["moves", "pushes"], weight: int, max_nodes: int) -> Search:
    """Return a solution by A*, one with the fewest moves or pushes (what ``count`` says) at ``weight`` 1.

    The estimate is ``weight`` times the assignment distance. That is consistent, so at weight 1 the first visit of a
    position is the best one; above 1 fewer positions are looked at. Gives up after ``max_nodes`` positions.
    """
    level, steps = start.level, dict(zip(MOVES, start.level.steps, strict=True))
    estimate = assignment_distance(level, start.boxes)
    if estimate is None or is_stuck(level, start.boxes):
        return Search("unsolvable")
    made: list[tuple[int, Push]] = [(-1, (-1, ""))]
    queue = [(weight * estimate, estimate, 0, 0, start.agent, start.boxes)]
    closed: set[tuple[int, int]] = set()
    while queue:
        _, estimate, node, cost, agent, boxes = heapq.heappop(queue)
        if not estimate:
            path = _trace(made, node)
            return Search("solved", _moves_of(start, path), len(path))
        region, options = pushes(level, agent, boxes)
        key = (boxes, region if count == "pushes" else agent)
        if key in closed:
            continue
        closed.add(key)
        if len(closed) > max_nodes:
            return Search("unknown")
        for walked, (box, move) in options:
            after = boxes ^ (1 << box) ^ (1 << box + steps[move])
            left = assignment_distance(level, after)
            if left is None or (after, box) in closed or is_stuck(level, after):
                continue
            total = cost + (1 if count == "pushes" else walked + 1)
            made.append((node, (box, move)))
            heapq.heappush(queue, (total + weight * left, left, len(made) - 1, total, box, after))
    return Search("unsolvable")


def _trace(made: list[tuple[int, Push]], node: int) -> list[Push]:
    """Return the pushes that lead to ``node``, first to last."""
    path = []
    while node:
        node, push = made[node]
        path.append(push)
    return path[::-1]


def _moves_of(position: Position, path: list[Push]) -> str:
    """Return the moves that make these pushes one after the other, each after the shortest walk to its box."""
    level, boxes, agent, moves = position.level, position.boxes, position.agent, ""
    for box, move in path:
        step = level.step(move)
        moves += _walk(level, boxes, agent, box - step) + move
        agent, boxes = box, boxes ^ (1 << box) ^ (1 << box + step)
    return moves


def _walk(level: Level, boxes: int, start: int, target: int) -> str:
    """Return the moves of a shortest walk that pushes nothing."""
    blocked = level.walls | boxes
    came = {start: ""}
    queue = deque([start])
    while target not in came:
        cell = queue.popleft()
        for move, step in zip(MOVES, level.steps, strict=True):
            if cell + step not in came and not blocked >> cell + step & 1:
                came[cell + step] = came[cell] + move
                queue.append(cell + step)
    return came[target]


@lru_cache(maxsize=1 << 16)
def solution(position: Position) -> Search:
    """Return the scripted solution: on small levels one with the fewest moves, on others one that is found soon."""
    if is_small(position.level):
        return search(position, "moves", 1, MAX_NODES)
    limit = MAX_NODES * 4 // max(4, position.boxes.bit_count())  # a position costs the more, the more boxes it has
    found = search(position, "moves", 2, limit // 5)
    return found if found.status != "unknown" else search(position, "pushes", 2, limit)


def pushes_left(position: Position) -> int | None:
    """Return the fewest pushes to a solution, ``None`` where a box is stuck for good.

    On small levels the number is exact and ``None`` means unsolvable. On others it is the assignment distance, and
    ``None`` means that a box off its goal is on a lost cell or frozen.
    """
    level = position.level
    if not is_small(level):
        return None if is_stuck(level, position.boxes) else assignment_distance(level, position.boxes)
    reached = position.reachable()
    return _exact_pushes_left(Position(level, (reached & -reached).bit_length() - 1, position.boxes))


@lru_cache(maxsize=1 << 16)
def _exact_pushes_left(position: Position) -> int | None:
    """Return the fewest pushes; the agent stands on the lowest cell of its region, so that walking costs nothing."""
    found = search(position, "pushes", 1, MAX_NODES)
    if found.status == "unknown":  # cannot be at the sizes called small; a number that is too low beats a false verdict
        return assignment_distance(position.level, position.boxes)
    return found.pushes if found.status == "solved" else None
