"""vLLM on a CPU as a measured system: one request per prompt, K completions each, prefix caching on."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
import vllm
from cells import completions_of, prompts_of
from serve import Order, channel, order, serve
from vllm import LLM, SamplingParams, TokensPrompt


class Vllm:
    """An engine and the cell's prompts."""

    def __init__(self, asked: Order) -> None:
        self.cell = cell = asked.cell
        self.llm = LLM(
            model=cell.folder,
            dtype=asked.settings["dtype"],
            max_model_len=cell.prompt + cell.new + 16,
            enable_prefix_caching=True,
            max_num_seqs=256,
            max_num_batched_tokens=4096,
            disable_log_stats=True,
            skip_tokenizer_init=True,
        )
        self.prompts = [TokensPrompt(prompt_token_ids=ids) for ids in prompts_of(cell)]

    def run(self) -> int:
        self.llm.reset_prefix_cache()
        chosen = SamplingParams(
            n=self.cell.candidates,
            temperature=1.0,
            max_tokens=self.cell.new,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        outputs = self.llm.generate(self.prompts, chosen, use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    def logprobs(self) -> list[float]:
        completion = completions_of(self.cell)[0][0]
        whole = TokensPrompt(prompt_token_ids=prompts_of(self.cell)[0] + completion)
        chosen = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = self.llm.generate([whole], chosen, use_tqdm=False)
        rows = output.prompt_logprobs[self.cell.prompt :]
        return [row[token].logprob for row, token in zip(rows, completion, strict=True)]

    def gemm(self) -> float:
        return 0.0


def main() -> None:
    asked, answers = order(), channel()
    torch.set_num_threads(asked.cell.threads)
    serve(Vllm(asked), answers, {"torch": torch.__version__, "vllm": vllm.__version__})


if __name__ == "__main__":
    main()
