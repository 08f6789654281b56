"""A model small enough to train on a laptop CPU in seconds, and its character tokenizer. Needs no download.

For tests, demos and small studies: about 0.8 million parameters, one token per character.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

PAD = "<|pad|>"
END = "<|end|>"
UNKNOWN = "<|unk|>"
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer: printable ASCII and newline, one token each, and the chat's control tokens.

    A character outside of that becomes ``<|unk|>``, which stays visible when decoded. The end token is ``<|end|>``.
    """
    control = [PAD, END, "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {token: index for index, token in enumerate([*control, UNKNOWN, *CHARACTERS])}
    # Byte-pair encoding without merges is a character tokenizer. The unknown token is known to the model only: as a
    # special token it would be invisible in decoded text, and its literal in a text would be parsed.
    backend = Tokenizer(BPE(vocab=vocab, merges=[], unk_token=UNKNOWN, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_config(
    *, width: int = 128, layers: int = 4, heads: int = 4, positions: int = 256, vocab: int | None = None
) -> GPT2Config:
    """Return the shape of a tiny model: learned absolute positions, no dropout, tied embeddings.

    ``positions`` is the context in tokens; ``vocab`` left out is the size of ``tiny_tokenizer``.
    """
    return GPT2Config(
        vocab_size=len(CHARACTERS) + 6 if vocab is None else vocab,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=positions,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own function as one fused operation
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # GPT-2's 0.02 was made for models six times as wide; with it a tiny one learns late, and some seeds hardly.
        initializer_range=width**-0.5,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def tiny_model(
    seed: int,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    positions: int = 256,
    vocab: int | None = None,
) -> GPT2LMHeadModel:
    """Return a fresh float32 model on the CPU, in eval mode; its weights depend on the seed and the shape only.

    The global random state is neither used nor changed.
    """
    config = tiny_config(width=width, layers=layers, heads=heads, positions=positions, vocab=vocab)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = GPT2LMHeadModel(config)
    return model.to(torch.float32).eval()
