"""``[hardware]``: where the engines, the learners and the environments of a run are. See ``config``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coterie.policy_tables import NonNegative, Positive, Table

EngineName = Literal["torch", "vllm"]


class PolicyHardware(Table):
    """``[hardware.policies.NAME]``: what differs for one policy; ``None`` means as in ``[hardware]``."""

    engine: EngineName | None = None
    rollout_workers: Positive | None = None
    update_workers: Positive | None = None
    rollout_gpus: NonNegative | None = None
    update_gpus: NonNegative | None = None
    colocated: bool | None = None


class HardwareTable(Table):
    """Which processes a run has, and what generates. ``local``: this one only; but for ``engine`` all keys are of
    ``ray``.
    """

    backend: Literal["local", "ray"] = "local"
    engine: EngineName = "torch"
    """What generates; ``vllm`` is a package of its own."""
    rollout_workers: Positive = 1
    """Engines per policy; policies that share a model in memory share them too."""
    update_workers: Positive = 1
    """Processes over which a policy's learner is sharded."""
    env_workers: Positive = 1
    """Processes that play environments."""
    rollout_gpus: NonNegative = 0.0
    """GPUs of one rollout worker; 0: it runs on the CPU."""
    update_gpus: NonNegative = 0.0
    colocated: bool = False
    """Whether rollout worker i and update worker i of a policy stand on the same bundle of devices."""
    address: str | None = None
    """``HOST:PORT`` of a running cluster; ``None``: ``RAY_ADDRESS``, or else one is started for the run, here."""
    local_nodes: Positive = 1
    """Nodes of a cluster that is started for the run."""
    local_cpus: Positive | None = None
    """CPUs that each of these nodes says it has; ``None``: as many as the workers need."""
    deadline_s: Annotated[float, Field(gt=0.0)] = 600.0
    """Seconds a worker may take over one call; then it is taken for dead and replaced."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often one worker may be replaced in a run."""
    policies: dict[str, PolicyHardware] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _read_keys_only(self) -> Self:
        """Refuse what nobody would read."""
        if self.backend == "local":
            given = [name for name in self.model_dump(exclude_defaults=True) if _only_of_ray(self, name)]
            if given:
                raise ValueError(
                    f'{given[0]} is read only with backend = "ray"; with "local" everything is in one process. Remove '
                    "it or change backend"
                )
        elif self.address is not None and (self.local_nodes != 1 or self.local_cpus is not None):
            raise ValueError("local_nodes and local_cpus are of a cluster that is started here; remove them or address")
        return self

    def of(self, policy: str) -> HardwareTable:
        """Return the table as it is for one policy."""
        own = self.policies.get(policy, PolicyHardware())
        return self.model_copy(update=own.model_dump(exclude_none=True))


def _only_of_ray(table: HardwareTable, name: str) -> bool:
    """Return whether only ``ray`` reads a key, or what a table of policies holds."""
    if name == "policies":
        return any(own.model_dump(exclude_none=True, exclude={"engine"}) for own in table.policies.values())
    return name != "engine"
