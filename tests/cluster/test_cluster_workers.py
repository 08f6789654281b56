"""Workers of a cluster, without Ray: whatever is lost, the bytes are those of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from cluster_toys import FakeActor, FakeTeam, Loss, fake_placed

from coterie.cluster.crew import Router
from coterie.cluster.engines import EnginePool
from coterie.cluster.learners import RemoteLearner
from coterie.cluster.players import EnvWorker
from coterie.cluster.wire import AbsentRenderer, Exchange, Job, job_of
from coterie.cluster.workers import TORN, EngineWorker
from coterie.engines import Request
from coterie.errors import CheckpointError, EngineError, EnvError, TrainError
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.record import read_rows
from coterie.rollout import plays_of
from coterie.runs import resume, start
from coterie.tensors import tensor_bytes, tensors_of
from learning_toys import MIX, PER_ROLE, WARM, quiet, snapshot, toy_recipe

Run = Callable[..., FakeTeam]


def journals(run_dir: Path) -> dict[str, bytes]:
    """Return what a run on a cluster shares with one in one process: not the recipe's copy."""
    return {name: data for name, data in snapshot(run_dir).items() if not name.endswith("recipe.json")}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a recipe in fake workers, some of which are lost."""

    def go(
        run_dir: Path, *settings: str, losses: Sequence[Loss] = (), max_restarts: int = 3, again: bool = False
    ) -> FakeTeam:
        teams: list[FakeTeam] = []
        recipe = toy_recipe(*settings, "hardware.backend=ray", "hardware.env_workers=2")
        with monkeypatch.context() as patch:
            patch.setattr("coterie.runs.placed", partial(fake_placed, teams, losses, max_restarts))
            if again:
                resume(run_dir, recipe, quiet(), accept_changes=True)
            else:
                start(recipe, run_dir, quiet())
        return teams[0]

    return go


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a run in one process, made once per settings."""
    made: dict[tuple[str, ...], Path] = {}

    def of(*settings: str) -> Path:
        if settings not in made:
            made[settings] = tmp_path_factory.mktemp("local") / "run"
            start(toy_recipe(*settings), made[settings], quiet())
        return made[settings]

    return of


@pytest.mark.parametrize(
    "settings",
    [(), PER_ROLE, (*PER_ROLE, *WARM, "eval.every=1"), MIX, ("sampling.mode=chain", "train.refill=2")],
    ids=["one", "two", "warm", "adapters", "chain"],
)
def test_a_run_in_workers_writes_the_bytes_of_a_run_in_one_process(
    settings: tuple[str, ...], run: Run, local: Callable[..., Path], tmp_path: Path
) -> None:
    run(tmp_path / "run", *settings)
    assert journals(tmp_path / "run") == journals(local(*settings))


@pytest.mark.parametrize(
    "loss",
    [
        ("environment worker 0", "go_on", 3),
        ("environment worker 1", "begin", 1),
        ("rollout worker 0", "generate", 4),
        ("rollout worker 0", "load", 1),
        ("update worker 0 of main", "step", 0),
        ("update worker 0 of other", "step", 3),
        ("update worker 0 of other", "save", 1),
    ],
    ids=lambda loss: f"{loss[0]} over {loss[1]} {loss[2]}".replace(" ", "-"),
)
def test_a_worker_that_is_lost_leaves_no_trace_in_the_numbers(
    loss: Loss, run: Run, local: Callable[..., Path], tmp_path: Path
) -> None:
    team = run(tmp_path / "run", *PER_ROLE, losses=[loss])
    assert [actor.restarts for actor in team.actors if actor.restarts] == [1]
    assert journals(tmp_path / "run") == journals(local(*PER_ROLE))


def test_a_learner_that_dies_over_and_over_ends_the_run_at_the_limit(run: Run, tmp_path: Path) -> None:
    losses = [("update worker 0 of main", "step", number) for number in range(3)]
    with pytest.raises(TrainError, match=r"update worker 0 of main died over step\. It has been replaced 2 times"):
        run(tmp_path / "run", losses=losses, max_restarts=2)


def test_a_learner_takes_the_updates_since_its_last_checkpoint_once_more(run: Run, tmp_path: Path) -> None:
    """Checkpoints are after steps 0, 2 and 4. Over update 3 (counted from 0) it dies: load 2, then updates 2 and 3."""
    team = run(tmp_path / "run", losses=[("update worker 0 of main", "step", 3)])
    calls = next(actor for actor in team.actors if actor.name.startswith("update")).calls
    assert calls == ["save", "step", "step", "save", "step", "step", "load", "step", "step", "save"]


def test_a_run_goes_on_elsewhere_where_it_stopped_in_one_process(
    run: Run, local: Callable[..., Path], tmp_path: Path
) -> None:
    start(toy_recipe("train.steps=2", *PER_ROLE), tmp_path / "run", quiet())
    (tmp_path / "run" / "summary.json").unlink()
    run(tmp_path / "run", *PER_ROLE, again=True)
    whole = local(*PER_ROLE)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_episodes_whose_worker_dies_at_every_attempt_are_dropped_and_counted(run: Run, tmp_path: Path) -> None:
    """Of 3 tasks a step, worker 0 has the first and the third. It dies in the step's first batch, twice."""
    losses = [("environment worker 0", "begin", 2), ("environment worker 0", "begin", 0)]
    run(tmp_path / "run", "train.retries=1", "train.max_failed_fraction=0.7", "train.steps=1", losses=losses)
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert (row["episodes_failed"], row["turns"]) == (2, 16)
    failed = [e for e in read_rows(tmp_path / "run" / "events.jsonl") if e["event"] == "episode_failed"]
    assert [e["where"] for e in failed] == ["environment worker 0"] * 2


# ---- one worker -----------------------------------------------------------------------------------------------------


@pytest.fixture
def lineup() -> Lineup:
    return assemble(check_env_fits(toy_recipe()))


def one_batch(lineup: Lineup) -> list[Request]:
    """Return the requests of the first batch of two episodes."""
    worker = env_worker(lineup)
    requests = list(worker.begin(job(lineup)).requests)
    worker.drop()
    return requests


def env_worker(lineup: Lineup) -> EnvWorker:
    return EnvWorker((), lineup.recipe, {name: policy.renderer for name, policy in lineup.policies.items()})


def job(lineup: Lineup) -> Job:
    rollout = lineup.rollout(training=True, event=lambda kind, fields: None, before_batch=lambda: None)
    tasks = lineup.make_env().tasks("train", 0, 2)
    plays = plays_of(tasks, seed=0, purpose="train", step=0, episodes_per_task=1)
    return job_of(plays, rollout.seats, rollout.plan, rollout.limits)


def test_an_engine_serves_the_version_it_was_sent_and_refuses_acts_of_another(lineup: Lineup) -> None:
    engine = EngineWorker((), lineup.recipe, ["main"], 1, 0.0)
    requests = one_batch(lineup)
    before = engine.generate(0, requests)
    weights = {name: w.clone() for name, w in lineup.policies["main"].weights().items()}
    weights["transformer.wte.weight"][7] += 50.0 * torch.sign(weights["transformer.ln_f.weight"])
    weights["transformer.ln_f.bias"] += torch.sign(weights["transformer.ln_f.weight"])
    assert engine.load("main", 1, tensor_bytes(weights)) == 1
    with pytest.raises(EngineError, match="at version 0; the engine has version 1"):
        engine.generate(1, requests)
    after = engine.generate(1, [replace(request, version=1) for request in requests])
    assert {c.ids[0] for completions in after for c in completions} == {7}
    assert {c.ids[0] for completions in before for c in completions} != {7}


def test_an_engine_whose_weights_were_torn_serves_nobody_until_it_gets_whole_ones(
    lineup: Lineup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = EngineWorker((), lineup.recipe, ["main"], 1, 0.0)
    weights = tensor_bytes(lineup.policies["main"].weights())
    monkeypatch.setenv("COTERIE_FAULT", "weight-sync:1:exc")
    with pytest.raises(RuntimeError, match="injected at weight-sync"):
        engine.load("main", 1, weights)
    with pytest.raises(EngineError, match=f"the engine has version {TORN}"):
        engine.generate(0, one_batch(lineup))
    monkeypatch.delenv("COTERIE_FAULT")
    assert engine.load("main", 1, weights) == 1


def test_weights_with_a_tensor_missing_or_of_another_shape_are_refused_by_name(lineup: Lineup) -> None:
    engine = EngineWorker((), lineup.recipe, ["main"], 1, 0.0)
    weights = dict(lineup.policies["main"].weights())
    missing = {name: w for name, w in weights.items() if name != "transformer.wte.weight"}
    with pytest.raises(CheckpointError, match=r"version 3 of policy 'main'.*'transformer.wte.weight'"):
        engine.load("main", 3, tensor_bytes(missing))


def test_every_trained_tensor_reaches_the_engine(lineup: Lineup) -> None:
    engine = EngineWorker((), lineup.recipe, ["main"], 1, 0.0)
    sent = {name: torch.randn(w.shape) for name, w in lineup.policies["main"].weights().items()}
    engine.load("main", 1, tensor_bytes(sent))
    served = tensors_of(tensor_bytes(engine._lineup.policies["main"].weights()))
    assert served.keys() == sent.keys()
    assert all(torch.equal(served[name], sent[name]) for name in sent)


class Sharing:
    """An update worker that saves nothing; its first sum fails where it is told so."""

    def __init__(self, failures: list[RuntimeError]) -> None:
        self.failures = failures

    def join(self, *where: object) -> None:
        """Meet nobody."""

    def save(self, folder: str) -> None:
        if self.failures:
            raise self.failures.pop()
        (Path(folder) / "learner.json").write_text("{}")


def sharing(lineup: Lineup, meeting: Path, losses: list[Loss]) -> tuple[RemoteLearner, list[FakeActor]]:
    """Return a learner in two workers, of which the first one's first sum fails."""
    failures = [RuntimeError("Connection closed by peer")]
    makes = [partial(Sharing, failures), partial(Sharing, [])]
    workers = [FakeActor(f"update worker {rank}", make, losses) for rank, make in enumerate(makes)]
    return RemoteLearner(workers, lineup.policies["main"], EnginePool([]), meeting, 60.0), workers


def test_update_workers_are_replaced_whichever_of_them_is_lost(lineup: Lineup, tmp_path: Path) -> None:
    """The second dies within a sum, and so the first one, which is asked first, raises."""
    learner, workers = sharing(lineup, tmp_path / "join", [("update worker 1", "save", 0)])
    learner.save(tmp_path)
    assert [(worker.restarts, worker.calls) for worker in workers] == [(1, ["join", "save", "join", "save"])] * 2


def test_an_update_that_fails_where_no_worker_is_lost_is_an_error(lineup: Lineup, tmp_path: Path) -> None:
    learner, workers = sharing(lineup, tmp_path / "join", [])
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        learner.save(tmp_path)
    assert [worker.restarts for worker in workers] == [0, 0]


class Stuck(FakeActor):
    """A worker that waits within a sum until it is let go."""

    go: ClassVar[threading.Event] = threading.Event()

    def wait(self, ref: Callable[[], object], doing: str) -> object:
        assert self.go.wait(60)
        return super().wait(ref, doing)


def test_an_update_worker_that_fails_by_itself_shows_while_the_others_still_wait_for_it(
    lineup: Lineup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one waits in a sum until its limit; the second one has failed."""
    monkeypatch.setattr("coterie.cluster.learners._SHOWS_S", 0.0)
    workers = [Stuck("update worker 0", partial(Sharing, []))]
    workers.append(FakeActor("update worker 1", partial(Sharing, [RuntimeError("out of memory")])))
    learner = RemoteLearner(workers, lineup.policies["main"], EnginePool([]), tmp_path / "join", 60.0)
    learner._joined = True
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            learner.save(tmp_path)
    finally:
        Stuck.go.set()
    assert [worker.restarts for worker in workers] == [0, 0]


class Serving:
    """An engine worker that only confirms, and answers every act with its task."""

    def load(self, policy: str, version: int, weights: object) -> int:
        return version

    def generate(self, rollout: int, requests: Sequence[Request]) -> list[tuple[str, ...]]:
        return [(request.episode.task_id,) for request in requests]


def test_an_engine_that_replaces_a_lost_one_gets_each_version_once() -> None:
    workers = [FakeActor(f"rollout worker {i}", Serving, [("rollout worker 1", "load", 0)]) for i in range(2)]
    EnginePool(workers).send("main", 1, b"")
    assert [worker.calls for worker in workers] == [["load"], ["load", "load"]]  # the lost call, and one to the new one


def test_a_task_stays_with_its_engine_and_a_new_one_hears_the_earlier_batches_again(lineup: Lineup) -> None:
    """Two tasks, two engines; the second engine dies over its second batch."""
    workers = [FakeActor(f"rollout worker {i}", Serving, [("rollout worker 1", "generate", 1)]) for i in range(2)]
    pool, (one, other) = EnginePool(workers), one_batch(lineup)
    assert pool.begin(0, [one, other])() == [(one.episode.task_id,), (other.episode.task_id,)]
    assert pool.begin(0, [other])() == [(other.episode.task_id,)]
    assert [len(worker.calls) for worker in workers] == [1, 4]  # 4: answered, lost, the first once more, answered


class Told(FakeActor):
    """An actor that writes down when it is asked and when it is waited for."""

    told: ClassVar[list[str]] = []

    def run(self, method: str, args: Sequence[object]) -> Callable[[], object]:
        self.told.append(f"{self.name} asked")
        return super().run(method, args)

    def wait(self, ref: Callable[[], object], doing: str) -> object:
        self.told.append(f"{self.name} waited for")
        return super().wait(ref, doing)


def test_the_engines_of_all_policies_work_at_the_same_time(lineup: Lineup) -> None:
    one, other = one_batch(lineup)
    pools = {name: EnginePool([Told(name, Serving)]) for name in ("main", "other")}
    answers = Router([], pools)._generate(0, [replace(other, policy="other"), one])
    assert answers == [(other.episode.task_id,), (one.episode.task_id,)]
    assert Told.told == ["other asked", "main asked", "other waited for", "main waited for"]


def test_an_environment_worker_asks_again_what_it_asked_before_it_was_lost(lineup: Lineup) -> None:
    engine = EngineWorker((), lineup.recipe, ["main"], 1, 0.0)
    worker = env_worker(lineup)
    first = worker.begin(job(lineup))
    answers = engine.generate(0, first.requests)
    past = [Exchange(requests=first.requests, answers=answers)]
    second = worker.begin(job(lineup), past)
    assert {request.act for request in second.requests} == {1}
    other = [Exchange(requests=first.requests[:1], answers=answers[:1])]
    with pytest.raises(EnvError, match="asked for other acts than before"):
        worker.begin(job(lineup), other)


def test_the_renderer_that_travels_with_a_job_renders_nothing() -> None:
    with pytest.raises(EngineError, match="'main': this renderer only stands for one"):
        AbsentRenderer("main").render("hello")
