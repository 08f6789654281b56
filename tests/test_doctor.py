"""The doctor passes what is right, and fails each deliberately broken set-up by the check that is for it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coterie.batch import MicroBatch, pack
from coterie.cli import app
from coterie.config import read_recipe
from coterie.doctor import CHECKS, Verdict, examine, run_check
from coterie.engines import Completion, Request
from coterie.engines.torch import TorchEngine
from coterie.env import Team
from coterie.errors import ConfigError
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.machine import (
    available_memory,
    folder_of,
    limit_kernel_caches,
    multiplies_bfloat16,
    peak_memory,
    release_memory,
    resident_memory,
)
from coterie.models.chat import ChatRenderer
from coterie.models.tiny import tiny_tokenizer
from coterie.probe import Packer, Probe, take_probe, trained_ids
from coterie.rehearsal import rehearse, restored
from coterie.shipped import shipped_recipes
from coterie.types import Outcome, Sample, Task, assistant, user
from learning_toys import PER_ROLE, Letters, sample, toy_recipe

END = 1
COOL = "sampling.temperature=0.6"


def lineup_of(*settings: str) -> Lineup:
    return assemble(check_env_fits(toy_recipe(*settings)))


@pytest.fixture(scope="module")
def probe() -> Probe:
    """Two policies, sampled at temperature 0.6, and nothing wrong with them; the tests break copies of it."""
    return take_probe(lineup_of(*PER_ROLE, COOL), available_memory=2**40)


@pytest.fixture(scope="module")
def lora_probe() -> Probe:
    """As ``probe``, with two adapters beside one model."""
    adapters = ("policies.main.train=lora", "policies.other.train=lora")
    return take_probe(lineup_of(*PER_ROLE, *adapters, COOL), available_memory=2**40)


def failed(probe: Probe, check: str) -> list[str]:
    """Return what one check finds wrong."""
    return [finding.message for finding in run_check(check, CHECKS[check], probe) if finding.verdict is Verdict.FAIL]


def verdicts(probe: Probe, check: str) -> list[Verdict]:
    return [finding.verdict for finding in run_check(check, CHECKS[check], probe)]


def failing_checks(probe: Probe) -> set[str]:
    return {check for check in CHECKS if failed(probe, check)}


def with_renderer(probe: Probe, name: str, renderer: ChatRenderer) -> Probe:
    policies = {key: copy.copy(policy) for key, policy in probe.lineup.policies.items()}
    policies[name].renderer = renderer
    return replace(probe, lineup=replace(probe.lineup, policies=policies, engine=TorchEngine(policies)))


# ---- what is right passes -------------------------------------------------------------------------------------------


def test_a_sound_set_up_passes_every_check_with_numbers(probe: Probe) -> None:
    findings = [finding for name, check in CHECKS.items() for finding in run_check(name, check, probe)]
    assert {finding.verdict for finding in findings} == {Verdict.OK}
    assert {finding.check.partition(",")[0] for finding in findings} == set(CHECKS)
    drawn = sum(len(done.ids) for draw in probe.draws for done in draw.completions if draw.request.policy == "main")
    assert f"{drawn} tokens, all equal" in findings[0].message
    assert all(not finding.remedy for finding in findings)


def test_the_weights_and_versions_are_the_same_afterwards_to_the_bit() -> None:
    lineup = lineup_of(*PER_ROLE)
    before = {name: copy.deepcopy(policy.model.state_dict()) for name, policy in lineup.policies.items()}
    lineup.policies["other"].version = 5
    assert all(finding.verdict is Verdict.OK for finding in examine(lineup, 2**40))
    for name, policy in lineup.policies.items():
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in policy.model.state_dict().items())
    assert (lineup.policies["main"].version, lineup.policies["other"].version) == (0, 5)


def test_the_step_that_is_taken_back_was_a_real_one(probe: Probe) -> None:
    """Else the test above would pass for a doctor that does nothing."""
    weight = next(probe.lineup.policies["main"].model.parameters())
    before = weight.detach().clone()
    with restored(probe.lineup):
        assert rehearse(probe, "main", 0.01).version == 1
        assert not torch.equal(weight, before)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    "settings",
    [
        ("policies.main.train=frozen",),
        ("train.precision=bfloat16",),
        ("policies.main.dtype=bfloat16", "policies.main.optimizer.lr=1e-5"),
        ("policies.main.train=lora", "policies.main.dtype=bfloat16"),
        (*PER_ROLE, "policies.main.train=lora", "policies.other.train=frozen"),
        ("sampling.mode=chain",),
        ("sampling.stop=['a']", "policies.main.template=plain"),
    ],
)
def test_every_kind_of_recipe_passes(settings: tuple[str, ...]) -> None:
    findings = examine(lineup_of(*settings), 2**40)
    assert [finding for finding in findings if finding.verdict is not Verdict.OK] == []
    assert findings[-1].check == "memory"


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if "smollm2" not in name])
def test_the_shipped_recipes_pass(name: str) -> None:
    recipe = read_recipe(shipped_recipes()[name], ("train.threads=1",))
    findings = examine(assemble(check_env_fits(recipe)), 2**40)
    assert {finding.verdict for finding in findings} == {Verdict.OK}


# ---- the five broken set-ups ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    ["message['content'].replace('a', 'b')", "message['content'].replace('b', '').replace('a', '')"],
    ids=["rewrites", "drops"],
)
def test_a_template_that_rewrites_or_drops_contents_fails(probe: Probe, content: str) -> None:
    """The first two tasks show the letters a and b; placeholders pass through this template unharmed."""
    tokenizer = tiny_tokenizer()
    template = str(tokenizer.chat_template).replace("message['content']", content)
    broken = with_renderer(probe, "main", ChatRenderer(tokenizer, template=template))
    (message, *_) = failed(broken, "chat template")
    assert message.startswith("main: ")
    assert any("rewrites or drops contents" in message for message in failed(broken, "chat template"))
    assert failing_checks(broken) == {"chat template"}


def test_a_template_that_drops_a_whole_message_is_refused_before_anything_is_loaded_into_it(tmp_path: Path) -> None:
    template = tmp_path / "bad.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(ConfigError, match=r"drops or moves message 0"):
        lineup_of(f"policies.main.template={template}")


class Stale(TorchEngine):
    """Serves copies made when it began, and claims that they are current."""

    def __init__(self, lineup: Lineup) -> None:
        self.current = lineup.policies
        super().__init__(copy.deepcopy(dict(lineup.policies)))

    def version(self, policy: str) -> int:
        return self.current[policy].version

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        return super().generate([replace(request, version=0) for request in requests])


def test_an_engine_that_serves_a_stale_copy_fails(probe: Probe) -> None:
    """SYNC-03, TEAM-04: everything agrees until the first update."""
    broken = replace(probe, lineup=replace(probe.lineup, engine=Stale(probe.lineup)))
    assert failed(broken, "updates reach the engine") == [
        f"{name}: after an update the engine answers exactly as before" for name in ("main", "other")
    ]
    assert failing_checks(broken) == {"updates reach the engine"}


def test_an_adapter_that_is_not_synced_fails_and_the_check_knows_adapters(lora_probe: Probe) -> None:
    """TEAM-04, SYNC-07: adapters beside one model; the engine holds copies of those it began with."""
    assert failing_checks(lora_probe) == set()
    broken = replace(lora_probe, lineup=replace(lora_probe.lineup, engine=Stale(lora_probe.lineup)))
    assert failed(broken, "updates reach the engine") == [
        f"{name}: after an update the engine answers exactly as before" for name in lora_probe.trained
    ]
    assert failing_checks(broken) == {"updates reach the engine"}


def test_two_adapters_that_are_one_fail(lora_probe: Probe) -> None:
    """TEAM-02, with adapters."""
    policies = {name: copy.copy(policy) for name, policy in lora_probe.lineup.policies.items()}
    first, second = lora_probe.trained
    policies[second].adapter = policies[first].adapter
    lineup = replace(lora_probe.lineup, policies=policies, engine=TorchEngine(policies))
    messages = failed(replace(lora_probe, lineup=lineup), "updates reach the engine")
    assert messages[0] == f"{first}: its update changes [{second!r}] too"


class Partial(TorchEngine):
    """Takes over all weights at every call, but for one tensor."""

    def __init__(self, lineup: Lineup, forgotten: str) -> None:
        self.current = lineup.policies
        self.copies = {name: copy.deepcopy(policy) for name, policy in lineup.policies.items()}
        self.forgotten = forgotten
        super().__init__(self.copies)

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        for name, policy in self.copies.items():
            state = self.current[name].model.state_dict()
            kept = policy.model.state_dict()[self.forgotten]
            policy.model.load_state_dict({**state, self.forgotten: kept})
            policy.version = self.current[name].version
        return super().generate(requests)


def test_an_engine_that_takes_over_all_but_one_tensor_fails(probe: Probe) -> None:
    """SYNC-03: its answers do change, but they are not those of the trained weights."""
    forgotten = "transformer.h.0.mlp.c_fc.weight"
    broken = replace(probe, lineup=replace(probe.lineup, engine=Partial(probe.lineup, forgotten)))
    messages = failed(broken, "updates reach the engine")
    assert len(messages) == 2
    assert all("log-probs differ by" in message and "after an update" in message for message in messages)


def test_two_policies_with_one_set_of_weights_fail(probe: Probe) -> None:
    """TEAM-02: training one must not change the other."""
    policies = {name: copy.copy(policy) for name, policy in probe.lineup.policies.items()}
    policies["other"].model = policies["main"].model
    lineup = replace(probe.lineup, policies=policies, engine=TorchEngine(policies))
    messages = failed(replace(probe, lineup=lineup), "updates reach the engine")
    assert messages[0] == "main: its update changes ['other'] too"


def without(batch: MicroBatch, keep: torch.Tensor) -> MicroBatch:
    """Return a batch with only the kept of its targets."""
    tensors = {
        "members_N": batch.members_N, "rows_N": batch.rows_N, "scored_at_N": batch.scored_at_N,
        "placed_at_N": batch.placed_at_N, "targets_N": batch.targets_N, "sampler_logprobs_N": batch.sampler_logprobs_N,
        "advantages_N": batch.advantages_N, "weights_N": batch.weights_N, "temperatures_N": batch.temperatures_N,
    }  # fmt: skip
    return replace(batch, **{name: tensor[keep] for name, tensor in tensors.items()})


def masks_the_end(
    samples: Sequence[Sample], weights: Sequence[float], max_tokens: int, device: torch.device, width: int
) -> list[MicroBatch]:
    """Pack as where the pad token is the end token, and the mask is ``ids != pad``."""
    return [without(batch, batch.targets_N != END) for batch in pack(samples, weights, max_tokens, device, width)]


def weighs_the_end_nothing(
    samples: Sequence[Sample], weights: Sequence[float], max_tokens: int, device: torch.device, width: int
) -> list[MicroBatch]:
    return [
        replace(batch, weights_N=batch.weights_N * (batch.targets_N != END))
        for batch in pack(samples, weights, max_tokens, device, width)
    ]


@pytest.mark.parametrize("broken_pack", [masks_the_end, weighs_the_end_nothing])
def test_end_tokens_masked_as_padding_fail(probe: Probe, broken_pack: Packer) -> None:
    """TOK-02: (5, 5, 1) would lose its last token, and (1,) everything."""
    broken = replace(probe, pack=broken_pack)
    messages = failed(broken, "end tokens are trained")
    assert [message.split(":")[0] for message in messages] == ["main", "other"]
    assert all("lose tokens in training" in message and "end tokens are [1]" in message for message in messages)
    assert "a step changes weights" not in failing_checks(broken)


def trains_padding(
    samples: Sequence[Sample], weights: Sequence[float], max_tokens: int, device: torch.device, width: int
) -> list[MicroBatch]:
    """Pack with one more target, at the last column of the last row."""
    batches = pack(samples, weights, max_tokens, device, width)
    last = batches[-1]
    every = torch.cat([torch.arange(len(last.targets_N)), torch.tensor([len(last.targets_N) - 1])])
    longer = without(last, every)
    placed = longer.placed_at_N.clone()
    placed[-1] = last.ids_BT.shape[1] - 1
    return [*batches[:-1], replace(longer, placed_at_N=placed)]


def test_padding_with_a_weight_fails(probe: Probe) -> None:
    """TOK-03."""
    assert len(failed(replace(probe, pack=trains_padding), "end tokens are trained")) == 2


def forgets_temperature(
    samples: Sequence[Sample], weights: Sequence[float], max_tokens: int, device: torch.device, width: int
) -> list[MicroBatch]:
    return pack([replace(item, temperature=1.0) for item in samples], weights, max_tokens, device, width)


def test_training_log_probs_without_the_temperature_fail(probe: Probe) -> None:
    """LOGP-01: sampled at 0.6, scored at 1."""
    broken = replace(probe, pack=forgets_temperature)
    messages = failed(broken, "engine and learner agree")
    assert [message.split(":")[0] for message in messages] == ["main", "other"]
    assert all("allowed on average is 0.0001" in message for message in messages)
    assert failing_checks(broken) == {"engine and learner agree"}


def test_the_temperature_is_missed_under_autocast_too() -> None:
    """bfloat16 hides differences of up to 0.05; this one is smaller."""
    sound = take_probe(lineup_of("train.precision=bfloat16", "sampling.temperature=0.95"))
    assert failed(sound, "engine and learner agree") == []
    assert len(failed(replace(sound, pack=forgets_temperature), "engine and learner agree")) == 1


def test_ids_encoded_again_from_text_fail(probe: Probe) -> None:
    """TOK-01: the text of a completion has no control tokens, and (h, e) may come back as one id."""
    renderer = probe.lineup.policies["main"].renderer

    def again(item: Sample) -> Sample:
        ids = tuple(renderer.text_ids(renderer.decode(item.completion_ids))) or (7,)
        return replace(item, completion_ids=ids, sampler_logprobs=(-1.0,) * len(ids))

    samples = {name: tuple(map(again, items)) for name, items in probe.samples.items()}
    changed = sum(new != old for name in samples for new, old in zip(samples[name], probe.samples[name], strict=True))
    assert changed > 0, "some completion has a control token, or the test shows nothing"
    broken = replace(probe, samples=samples)
    messages = failed(broken, "sampled ids are trained ids")
    assert messages
    assert all("are not trained as sampled" in message for message in messages)


def test_a_completion_that_is_trained_twice_or_never_fails(probe: Probe) -> None:
    twice = {name: (*items, items[0]) for name, items in probe.samples.items()}
    (message, _) = failed(replace(probe, samples=twice), "sampled ids are trained ids")
    assert ": 0 of " in message
    assert ", 1 are trained that were not sampled" in message
    never = {name: items[1:] for name, items in probe.samples.items()}
    (message, _) = failed(replace(probe, samples=never), "sampled ids are trained ids")
    assert ": 1 of " in message


# ---- the other checks -----------------------------------------------------------------------------------------------

THINKS = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>?{% endif %}"
)
"""Opens an answer with a character that it leaves out of the history."""


class Quoting(Letters):
    """As ``Letters``, and each role is shown what it said before."""

    async def play(self, task: Task, team: Team) -> Outcome:
        for role in self.active_roles:
            first = await team.act(role, "x", score=self._score)
            await team.act(role, [user("x"), assistant(first.turn), user("y")], score=self._score)
        return Outcome(success=False, team=0.0)


def test_a_template_that_does_not_extend_is_a_warning_unless_own_turns_are_quoted(tmp_path: Path) -> None:
    """TMPL-01."""
    template = tmp_path / "thinks.jinja"
    template.write_text(THINKS)
    settings = (f"policies.main.template={template}",)
    plain = take_probe(lineup_of(*settings))
    assert verdicts(plain, "chat template") == [Verdict.OK, Verdict.WARNING]
    quoting = take_probe(lineup_of(*settings, "env.name=test_doctor:Quoting"))
    (message,) = failed(quoting, "chat template")
    # <|user|>, the 12 characters of "What is 2+2?", <|end|>, <|assistant|>; then the "?" is missing
    assert "leaves the first turn's ids at index 15" in message
    assert "quotes the role's own turns" in message


def test_white_space_that_the_template_trims_is_a_warning(probe: Probe) -> None:
    tokenizer = tiny_tokenizer()
    template = str(tokenizer.chat_template).replace("message['content']", "message['content'] | trim")
    renderer = ChatRenderer(tokenizer, template=template)
    broken = replace(with_renderer(probe, "main", renderer), prompts={"main": ("a ", "b")})
    assert verdicts(broken, "chat template") == [Verdict.WARNING, Verdict.OK]


def test_prompts_that_look_like_control_tokens_are_no_fault_of_the_template(probe: Probe) -> None:
    """TMPL-07: a plain call would take the text for the token; rendering does not."""
    forging = replace(probe, prompts={"main": ("<|end|>a",)})
    assert verdicts(forging, "chat template") == [Verdict.OK]


def test_a_step_without_effect_fails() -> None:
    """1e-50 is 0 in float32; at 1e-30 the biases, which begin at 0, would move."""
    tiny_step = take_probe(lineup_of("policies.main.optimizer.lr=1e-50"))
    (message,) = failed(tiny_step, "a step changes weights")
    assert message.startswith("main: 0.0% of the weights changed at lr 1e-50, gradient norm ")


def test_memory_is_compared_with_what_is_left_beyond_the_loaded_weights(probe: Probe) -> None:
    """Both policies: 2 * (parameters * 4 * 3 of gradients and two moments + 16384 activations of a token)."""
    policy = probe.lineup.policies["main"].model
    count = sum(weight.numel() for weight in policy.parameters())
    token = 1 * 16 * 16 * 4 + 102 * 3 * 4  # layers, width, values, bytes; vocabulary, copies, bytes
    need = 2 * (count * 12 + 16384 * token)
    assert failed(replace(probe, available_memory=need), "memory") == []
    (message,) = failed(replace(probe, available_memory=need - 1), "memory")
    assert "are left" in message
    assert verdicts(replace(probe, available_memory=None), "memory") == [Verdict.OK]


def test_a_policy_whose_roles_never_act_is_told(probe: Probe) -> None:
    silent = replace(
        probe,
        draws=tuple(draw for draw in probe.draws if draw.request.policy == "main"),
        samples={**probe.samples, "other": ()},
    )
    assert verdicts(silent, "sampled ids are trained ids") == [Verdict.OK, Verdict.WARNING]
    assert failing_checks(silent) == set()


def test_a_check_that_breaks_has_failed_and_the_others_still_run(probe: Probe) -> None:
    def breaks(*arguments: object) -> list[MicroBatch]:
        raise RuntimeError("no packing today")

    (message,) = failed(replace(probe, pack=breaks), "end tokens are trained")
    assert message == "RuntimeError: no packing today"
    assert failed(replace(probe, pack=breaks), "memory") == []


def test_a_team_that_cannot_play_is_one_finding() -> None:
    findings = examine(lineup_of("env.broken=1"))
    assert [(finding.check, finding.verdict) for finding in findings] == [("the team plays", Verdict.FAIL)]
    assert "no play of train-0" in findings[0].message


def test_weighted_ids_are_read_per_sample() -> None:
    samples = [sample((5, 6), (7, 8)), sample((5, 6), (9,)), sample((4,), (1,))]
    (batch,) = pack(samples, [1.0, 1.0, 1.0], 64, torch.device("cpu"), 256)
    assert trained_ids(batch) == [(7, 8), (9,), (1,)]


# ---- the machine, and the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 rdpid\n", True),
        ("flags : fpu amx_bf16\n", True),
        ("Features : fp asimd bf16\n", True),
        ("flags : fpu avx2 avx512f avx512bw\nbugs : bf16\n", False),
        ("", False),
    ],
)
def test_a_processor_multiplies_bfloat16_where_its_flags_say_so(tmp_path: Path, text: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is fast
    assert not multiplies_bfloat16(tmp_path / "none")


def test_memory_that_is_left_is_the_smaller_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:   100 kB\nMemAvailable:     8 kB\n")
    assert available_memory(meminfo, tmp_path) == 8192
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 8192
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory(meminfo, tmp_path) == 4000


def test_the_memory_of_a_process_is_read_from_its_status(tmp_path: Path) -> None:
    status = tmp_path / "status"
    assert (resident_memory(status), peak_memory(status)) == (None, None)
    status.write_text("Name:\tx\nVmHWM:\t    20 kB\nVmRSS:\t    10 kB\n")
    assert (resident_memory(status), peak_memory(status)) == (10240, 20480)


def test_caches_of_kernels_are_limited_unless_the_environment_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    limit_kernel_caches()
    assert (os.environ["LRU_CACHE_CAPACITY"], os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("7", "64")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process takes")
def test_freed_memory_is_kept_when_that_is_asked_for_and_then_given_back_on_demand() -> None:
    """64 MiB, above what the C library takes from its heap by itself, so that it would be given back at once."""
    code = """
from coterie.machine import keep_freed_memory, release_memory, resident_memory
keep_freed_memory()
before = resident_memory()
block = bytearray(b"x") * 2**26
del block
kept = resident_memory() - before
release_memory()
print(kept // 2**20, (resident_memory() - before) // 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept, left = (int(word) for word in done.stdout.split())
    assert kept >= 60
    assert left <= 8


def test_a_folder_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_folder").mkdir()
    (tmp_path / "real_package").mkdir()
    (tmp_path / "real_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert folder_of("plain_folder") is None
    assert folder_of("real_package") == tmp_path / "real_package"
    assert folder_of("no such name") is None


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what a process takes")
def test_freed_memory_is_given_back() -> None:
    """Blocks too small to be mapped one by one, with one in use above them: the heap cannot shrink by itself."""
    blocks = [bytes(100_000) for _ in range(1000)]
    pin = bytes(100_000)
    del blocks
    before = resident_memory()
    release_memory()
    after = resident_memory()
    assert len(pin) == 100_000
    assert before is not None
    assert after is not None
    assert after <= before


TOML = """
trackers = []
[env]
name = "learning_toys:Letters"
[policies.main]
model = "tiny:width=16,layers=1,heads=2,positions=32"
[team]
first = "main"
second = "main"
[sampling]
num_candidates = 4
max_tokens = 3
[train]
steps = 1
tasks_per_step = 2
threads = 1
"""


def test_the_command_prints_every_check_and_ends_with_0_or_1(tmp_path: Path) -> None:
    path = tmp_path / "letters.toml"
    path.write_text(TOML)
    good = CliRunner().invoke(app, ["doctor", str(path)])
    assert (good.exit_code, good.stdout.count("ok    ")) == (0, len(CHECKS) + 1)  # two findings on the template
    bad = CliRunner().invoke(app, ["doctor", str(path), "--set", "policies.main.optimizer.lr=1e-50"])
    assert bad.exit_code == 1
    assert "FAIL  a step changes weights: main: 0.0% of the weights changed" in bad.stdout
    assert "what to do: raise policies.main.optimizer.lr" in bad.stdout
