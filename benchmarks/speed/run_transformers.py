"""``transformers.generate`` as a measured system: every prompt once per candidate, in batches of the best size."""

from __future__ import annotations

import torch
import transformers
from cells import completions_of, prompts_of
from serve import Order, channel, order, serve
from transformers import AutoModelForCausalLM, GenerationConfig


class Transformers:
    """A model and the cell's prompts."""

    def __init__(self, asked: Order) -> None:
        self.cell = cell = asked.cell
        self.batch = int(asked.settings["rows"])
        self.model = AutoModelForCausalLM.from_pretrained(
            cell.folder, dtype=asked.settings["dtype"], attn_implementation="sdpa"
        ).eval()
        self.model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=cell.new,
            max_new_tokens=cell.new,
            pad_token_id=0,
            eos_token_id=None,
        )
        self.prompts = [ids for ids in prompts_of(cell) for _ in range(cell.candidates)]

    @torch.inference_mode()
    def run(self) -> int:
        tokens = 0
        for start in range(0, len(self.prompts), self.batch):
            ids = torch.tensor(self.prompts[start : start + self.batch])
            out = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
            tokens += out[:, self.cell.prompt :].numel()
        return tokens

    @torch.inference_mode()
    def logprobs(self) -> list[float]:
        completion = completions_of(self.cell)[0][0]
        ids = torch.tensor([self.prompts[0] + completion])
        logits = self.model(input_ids=ids).logits[0, self.cell.prompt - 1 : -1].float()
        picked = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])
        return [float(value) for value in picked.squeeze(1)]

    def gemm(self) -> float:
        return 0.0


def main() -> None:
    asked, answers = order(), channel()
    torch.set_num_threads(asked.cell.threads)
    serve(Transformers(asked), answers, {"torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    main()
