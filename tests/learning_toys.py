"""Small models, samples and an env for the tests of sampling and training; nothing here is a test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from coterie.engines import Request, Sampling
from coterie.env import Env, EnvOptions, Team
from coterie.models.chat import ChatRenderer
from coterie.models.policy import Policy
from coterie.models.tiny import tiny_model, tiny_tokenizer
from coterie.types import EpisodeKey, Outcome, Reward, Sample, Scored, Task

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


def policy_of(
    model: PreTrainedModel, *, name: str = "main", end_ids: Sequence[int] = (1,), context: int = 64
) -> Policy:
    """Return a policy around a model."""
    return Policy(name=name, model=model, renderer=RENDERER, context=context, end_ids=frozenset(end_ids))


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


class LettersOptions(EnvOptions):
    """Options of ``Letters``."""

    size: int | None = None
    rounds: int = 2
    mood: Literal["plain", "flat", "nan", "raises", "lazy"] = "plain"


class Letters(Env):
    """Two roles write letters in turn; a text is worth the sum of its characters modulo 5, divided by 4."""

    roles = ("first", "second")
    scored_roles = ("first", "second")
    Options = LettersOptions
    options: LettersOptions

    def num_tasks(self, split: str) -> int | None:
        return self.options.size

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [
            Task(id=f"{split}-{i}", split=split, seed=i, data={"letter": chr(97 + i % 26), "number": i})
            for i in range(start, start + count)
        ]

    async def play(self, task: Task, team: Team) -> Outcome:
        if self.options.mood == "raises" and task.seed % 3 == 0:
            raise ValueError(f"no play of {task.id}")
        worth = 0.0
        letter = str(task.data["letter"])
        for _ in range(self.options.rounds):
            for role in self.active_roles:
                done = await team.act(role, letter, score=self._score, expert=self._expert)
                worth += done.result / (len(self.active_roles) * self.options.rounds)
                letter = (letter + done.text)[-3:]
        return Outcome(success=worth > 0.7, team=worth, local=dict.fromkeys(self.active_roles, 0.0))

    def _score(self, text: str) -> Scored[float]:
        value = sum(map(ord, text)) % 5 / 4
        if self.options.mood == "flat":
            value = 0.5
        if self.options.mood == "lazy":  # flat unless the first letter is one of few
            value = 1.0 if text[:1] in tuple("abcdefgh") else 0.0
        missing = self.options.mood == "nan" and sum(map(ord, text)) % 3 == 0
        return Scored(Reward(float("nan") if missing else value), value)

    @staticmethod
    def _expert(rng: random.Random, noise: float) -> str:
        return rng.choice("xyz") if rng.random() < noise else "q"
