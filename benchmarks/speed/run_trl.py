"""TRL's GRPOTrainer as a measured system: its own training loop, with its own generation or on given samples.

The loop stops before every optimiser step and waits for the next order, so that a step is timed from the first
micro-batch to the end of the optimiser's work.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
import trl
from cells import advantages_of, completions_of, prompts_of
from datasets import Dataset
from serve import Order, channel, greet, order, peak_bytes, say, serve
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Trl:
    """A trainer over the cell's tokens. ``settings``: dtype of the weights, bf16 (autocast), rows of a micro-batch."""

    def __init__(self, asked: Order) -> None:
        self.cell = cell = asked.cell
        settings = asked.settings
        model = AutoModelForCausalLM.from_pretrained(cell.folder, dtype=settings["dtype"], attn_implementation="sdpa")
        rows = int(settings["rows"])
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(prefix="trl-"),
            use_cpu=True,
            bf16=settings["bf16"],
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=cell.rows // rows,
            num_generations=cell.candidates,
            max_completion_length=cell.new,
            generation_kwargs={"min_new_tokens": cell.new},
            temperature=1.0,
            top_k=0,
            beta=0.0,
            num_iterations=1,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            max_steps=10**6,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            disable_dropout=True,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
        )
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=_reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(cell.prompts)]}),
            processing_class=AutoTokenizer.from_pretrained(cell.folder),
        )
        prompts = prompts_of(cell)
        if cell.kind == "step":
            # The dataset names prompts by number; their ids are the cell's.
            self.trainer._tokenize_prompts = lambda texts: ([prompts[int(text)] for text in texts], None, {})
        else:
            self.trainer._generate_and_score_completions = lambda inputs: self.given()

    def given(self) -> dict[str, Any]:
        """Return the samples of the cell, as the trainer's generation would."""
        prompts = [ids for ids in prompts_of(self.cell) for _ in range(self.cell.candidates)]
        completions = [ids for drawn in completions_of(self.cell) for ids in drawn]
        advantages = [value for values in advantages_of(self.cell) for value in values]
        prompt_ids, completion_ids = torch.tensor(prompts), torch.tensor(completions)
        return {
            "prompt_ids": prompt_ids,
            "prompt_mask": torch.ones_like(prompt_ids),
            "completion_ids": completion_ids,
            "completion_mask": torch.ones_like(completion_ids),
            "advantages": torch.tensor(advantages),
            "num_items_in_batch": torch.tensor(completion_ids.numel()),
        }

    def run(self) -> int:
        raise NotImplementedError("steps are taken by the trainer's loop")

    @torch.no_grad()
    def logprobs(self) -> list[float]:
        given, trainer = self.given(), self.trainer
        ids = torch.cat([given["prompt_ids"][:1], given["completion_ids"][:1]], dim=1)
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model.eval(), ids, torch.ones_like(ids), self.cell.new
        )
        return [float(value) for value in logprobs[0]]

    def gemm(self) -> float:
        return 0.0


def _reward(completions: list[str], **columns: Any) -> list[float]:
    """Return rewards that differ within every group."""
    return [float(number % 2) for number in range(len(completions))]


class Steps(TrainerCallback):
    """Waits for an order before each step of the trainer and answers after it."""

    def __init__(self, system: Trl, answers: Any) -> None:
        self.system = system
        self.answers = answers
        self.began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        for line in sys.stdin:
            if line.strip() == "run":
                break
        else:
            os._exit(0)
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        took = time.perf_counter() - self.began
        cell = self.system.cell
        tokens = cell.rows * cell.new
        say(self.answers, {"seconds": took, "tokens": tokens, "peak_bytes": peak_bytes()})


def main() -> None:
    asked, answers = order(), channel()
    torch.set_num_threads(asked.cell.threads)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    system = Trl(asked)
    if asked.cell.kind == "check":
        serve(system, answers, versions)
        return
    system.trainer.add_callback(Steps(system, answers))
    greet(answers, versions)
    system.trainer.train()


if __name__ == "__main__":
    main()
