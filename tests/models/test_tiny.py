"""The tiny model and its character tokenizer."""

from __future__ import annotations

import torch

from coterie.models.tiny import CHARACTERS, tiny_config, tiny_model, tiny_tokenizer


def test_every_printable_character_is_one_token_and_comes_back() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(CHARACTERS)
    assert len(CHARACTERS) == 96
    assert ids == list(range(6, 102))
    assert tokenizer.decode(ids) == CHARACTERS
    assert len(tokenizer) == 102


def test_an_unknown_character_stays_visible() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("aéb")
    assert ids[1] == 5
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|unk|>b"


def test_the_chat_template_writes_control_tokens_and_no_other() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    a = 6 + CHARACTERS.index("a")
    assert tokenizer.encode(text) == [2, a + 18, 1, 3, a + 20, 1, 4]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)


def test_weights_depend_on_the_seed_and_not_on_the_global_random_state() -> None:
    torch.manual_seed(1)
    one = tiny_model(3, width=16, layers=1, heads=2)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    two = tiny_model(3, width=16, layers=1, heads=2)
    other = tiny_model(4, width=16, layers=1, heads=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state()), "making a model moved the global random state"


def test_the_default_model_has_about_0_8_million_parameters_and_no_dropout() -> None:
    # 102 x 128 tokens + 256 x 128 positions + 4 x (12 x 128^2 + 13 x 128) + 2 x 128, head tied
    model = tiny_model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 839_168
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    config = tiny_config()
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.0, 0.0, 0.0)
    assert not model.training
