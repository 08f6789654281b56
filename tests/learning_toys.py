"""Small models, samples and an env for the tests of sampling and training; nothing here is a test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coterie.config import Recipe, override, parse_recipe
from coterie.engines import Request, Sampling
from coterie.faults import VARIABLE
from coterie.models.adapters import Adapter, Resident
from coterie.models.chat import ChatRenderer
from coterie.models.policy import Policy
from coterie.models.tiny import tiny_model, tiny_tokenizer
from coterie.policy_tables import LoraTable
from coterie.runs import StopRequestedError, resume, start
from coterie.train import Listener
from coterie.types import EpisodeKey, Json, Sample
from letters import FourLetters as FourLetters
from letters import Letters as Letters
from letters import LettersOptions as LettersOptions

VOCAB = 102
# Models this small are slower on several threads, and much slower on a machine that does something else too.
torch.set_num_threads(1)
RENDERER = ChatRenderer(tiny_tokenizer())


def gpt2(seed: int = 0, *, vocab: int = VOCAB, positions: int = 64, spread: float = 3.0) -> PreTrainedModel:
    """Return a 2-layer GPT-2, its weights ``spread`` times as large as usual so that outputs differ clearly."""
    return _spread(tiny_model(seed, width=32, layers=2, heads=4, positions=positions, vocab=vocab), spread)


def llama(seed: int = 0, *, vocab: int = VOCAB, positions: int = 64, spread: float = 3.0) -> PreTrainedModel:
    """Return a 2-layer Llama: rotary positions, 4 heads on 2 key-value heads, untied embeddings."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return _spread(model.float().eval(), spread)


def _spread(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def bigram(table: torch.Tensor) -> PreTrainedModel:
    """Return a model whose next-token logits are exactly row ``id`` of the table, whatever came before."""
    size = table.shape[0]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size, n_embd=size, n_layer=1, n_head=1, n_positions=64, tie_word_embeddings=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    variance = 1.0 / size - 1.0 / size**2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wte.weight.copy_(torch.eye(size))
        # The last layer norm takes a one-hot vector to itself.
        model.transformer.ln_f.weight.fill_((variance + 1e-5) ** 0.5)
        model.transformer.ln_f.bias.fill_(1.0 / size)
        model.lm_head.weight.copy_(table.T)
    return model


def switch() -> PreTrainedModel:
    """Return a model that is uniform until an adapter writes 7 or 9 into its stream; then it says that token."""
    table = torch.zeros(16, 16)
    table[7, 7] = table[9, 9] = 50.0
    model = bigram(table)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.bias.fill_(1.0)  # something for an adapter of the next module to see
    return model


def policy_of(
    model: PreTrainedModel, *, name: str = "main", end_ids: Sequence[int] = (1,), context: int = 64
) -> Policy:
    """Return a policy around a model."""
    return Policy(name=name, model=model, renderer=RENDERER, context=context, end_ids=frozenset(end_ids))


Stirred = TypeVar("Stirred", Adapter, Policy)


def stirred(adapter: Stirred, seed: int = 0) -> Stirred:
    """Return the adapter, or a policy's, with random values instead of those that change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in adapter.weights().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return adapter


def lora_team(model: PreTrainedModel, *names: str, lora: LoraTable | None = None) -> dict[str, Policy]:
    """Return policies with an adapter each beside one model, and the policy ``base`` that plays it as it is."""
    resident = Resident(model)
    adapters = {name: resident.attach(name, lora or LoraTable(), seed=0) for name in names}
    adapters["base"] = resident.adapter_off()
    policies = {name: policy_of(model, name=name, end_ids=()) for name in adapters}
    for name, policy in policies.items():
        policy.adapter = adapters[name]
    return policies


def request(
    prompt_ids: Sequence[int],
    *,
    candidates: int = 1,
    max_tokens: int = 8,
    temperature: float = 1.0,
    stop: tuple[str, ...] = (),
    policy: str = "main",
    version: int = 0,
    seed: int = 0,
    task: str = "task",
    index: int = 0,
    act: int = 0,
) -> Request:
    """Return a request for the candidates 0, 1, ..."""
    return Request(
        episode=EpisodeKey(seed=seed, purpose="train", step=0, task_id=task, index=index),
        act=act,
        role="role",
        seat=0,
        policy=policy,
        version=version,
        prompt_ids=tuple(prompt_ids),
        candidates=tuple(range(candidates)),
        sampling=Sampling(temperature=temperature, max_tokens=max_tokens, stop=stop),
    )


def sample(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    advantage: float = 1.0,
    logprobs: Sequence[float] | None = None,
    temperature: float = 1.0,
    policy: str = "main",
    version: int = 0,
) -> Sample:
    """Return a sample; its sampler log-probs are 0 unless given."""
    return Sample(
        policy=policy,
        version=version,
        role="role",
        peers="peers",
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        sampler_logprobs=tuple(logprobs) if logprobs is not None else (0.0,) * len(completion_ids),
        advantage=advantage,
        temperature=temperature,
    )


def random_samples(rng: random.Random, count: int, *, vocab: int = VOCAB) -> list[Sample]:
    """Return samples over a few prompts, shared by some of them, of all lengths from 1."""
    prompts = [tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 9))) for _ in range(max(1, count // 3))]
    return [
        sample(
            rng.choice(prompts),
            [rng.randrange(vocab) for _ in range(rng.randint(1, 8))],
            advantage=rng.choice([-1.0, -0.25, 0.5, 2.0]),
            temperature=rng.choice([0.5, 1.0, 1.5]),
        )
        for _ in range(count)
    ]


def plain_logprobs(model: PreTrainedModel, item: Sample) -> torch.Tensor:
    """Return log P(completion token | all before) of one sample alone: no packing, padding, mask or cache."""
    ids = torch.tensor([[*item.prompt_ids, *item.completion_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0] / item.temperature
    start = len(item.prompt_ids)
    scored = torch.log_softmax(logits[start - 1 : -1], dim=-1)
    return scored.gather(1, torch.tensor(item.completion_ids)[:, None]).squeeze(1)


# ---- runs -------------------------------------------------------------------------------------------------------

_BASE: dict[str, Any] = {
    "env": {"name": "learning_toys:Letters"},
    "policies": {"main": {"model": "tiny:width=16,layers=1,heads=2,positions=32", "optimizer": {"lr": 0.01}}},
    "team": {"first": "main", "second": "main"},
    "sampling": {"num_candidates": 4, "max_tokens": 3},
    "train": {"steps": 4, "tasks_per_step": 3, "save_every": 2, "threads": 1},
    "eval": {"tasks": 4, "final_tasks": 4},
    "trackers": [],
}
PER_ROLE = (
    "policies.other.model=tiny:width=16,layers=1,heads=2,positions=32",
    "policies.other.optimizer.lr=0.01",
    "team.second=other",
)
TINY = "tiny:width=8,layers=1,heads=2,positions=32"
MIX = (
    "env.name=learning_toys:FourLetters",
    f"policies.a.model={TINY}",
    "policies.a.train=lora",
    "policies.a.optimizer.lr=0.01",
    "policies.a.kl.coef=0.05",
    f"policies.b.model={TINY}",
    "policies.b.train=lora",
    "policies.b.optimizer.lr=0.01",
    "policies.b.update_every=2",
    f"policies.frozen.model={TINY}",
    "policies.frozen.train=frozen",
    "team.second=a",
    "team.third=b",
    "team.fourth=frozen",
)
"""A whole model, two adapters and a frozen policy beside another model; one adapter is trained in every other step."""
WARM = ("imitate.steps=4", "imitate.episodes=4", "imitate.batch_acts=4")


def toy_table(*settings: str) -> dict[str, Any]:
    """Return a recipe of 4 steps that runs in a second, as a table, with settings as of ``--set``."""
    return override(_BASE, settings)


def toy_recipe(*settings: str) -> Recipe:
    """Return that recipe."""
    return parse_recipe(toy_table(*settings), "toy recipe")


def quiet() -> Listener:
    """Return a listener that does nothing."""
    return Listener(
        step=lambda report: None,
        score=lambda name, score: None,
        imitate=lambda name, step, steps, loss: None,
        stop=lambda: None,
    )


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Return what two equal runs must share byte for byte: journals without clock, episodes, the last checkpoint."""
    last = max((run_dir / "checkpoints").glob("step_0*"))
    files = [run_dir / "metrics.jsonl", run_dir / "eval.jsonl", *(run_dir / "episodes").glob("*")]
    files += [path for path in last.rglob("*") if path.is_file() and path.name not in ("MANIFEST.json",)]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files if "timings" not in path.name}


def _child(run_dir: str, settings: tuple[str, ...], fault: str, slow_s: float) -> None:
    os.environ[VARIABLE] = fault
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    listener = quiet()
    if slow_s:

        def wait() -> None:
            (Path(run_dir).parent / "alive").touch()
            time.sleep(slow_s)

        listener = Listener(step=listener.step, score=listener.score, imitate=listener.imitate, stop=wait)
    try:
        if (Path(run_dir) / "recipe.json").exists():
            resume(Path(run_dir), None, listener, accept_changes=False)
        else:
            start(toy_recipe(*settings), Path(run_dir), listener)
    except StopRequestedError as stop:
        sys.exit(stop.exit_code)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["coterie.runs"])


class Child:
    """A run in a process of its own: started where the folder is new, else resumed. ``slow_s``: pause per batch."""

    def __init__(self, run_dir: Path, settings: Sequence[str] = (), *, fault: str = "", slow_s: float = 0.0) -> None:
        self.alive = run_dir.parent / "alive"
        self.alive.unlink(missing_ok=True)
        self.timer = threading.Timer(0.0, lambda: None)
        self.process = _context.Process(target=_child, args=(str(run_dir), tuple(settings), fault, slow_s))
        self.process.start()

    def exit_code(self) -> int | None:
        """Wait for its end, and return its exit code (-9 after SIGKILL)."""
        self.process.join(60)
        self.timer.cancel()  # its process id may soon be somebody else's
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError("the run did not end within 60 s")
        return self.process.exitcode

    def wait_until_playing(self) -> None:
        """Return once its first batch is about to run."""
        deadline = time.monotonic() + 60
        while not self.alive.exists():
            if time.monotonic() > deadline or not self.process.is_alive():
                raise TimeoutError("the run did not come to its first batch")
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def send_after(self, number: signal.Signals, delay_s: float) -> None:
        """Send a signal after a while, unless it has ended by then."""

        def shoot() -> None:
            with contextlib.suppress(ProcessLookupError):
                self.send(number)

        self.timer = threading.Timer(delay_s, shoot)
        self.timer.start()


def numbers(row: Mapping[str, Json], key: str) -> float:
    """Return a number of a row."""
    value = row[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return float(value)
