"""Every rule of the linter: a config that it speaks of, the nearest one that it does not, and its fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlcore.cli.compose import config_folder
from rlcore.config_rules_rollout import ROLLOUT_RULES
from rlcore.lint_finding import kebab_case
from rlcore.lint_rules import LINT_RULES
from tests.lint_cases import ARGS, ENGINE, TIS, VLLM, after_fix, findings, found_by

ROOT = Path(__file__).resolve().parents[2]
MODE = "rollout.vllm.logprobs_mode"
RAW = f"{VLLM} {MODE}=raw_logprobs"
PLAIN = "sampling.top_k=null sampling.top_p=null"
REPLAY = f"{VLLM} sampling.support=replay"
BOUND = "importance.sequence_error_max=1.1"
SPECULATIVE, GENERATION = f"{ENGINE}.speculative_config", f"{ENGINE}.generation_config"
DRAFT = f"{VLLM} {SPECULATIVE}={{model:tiny}}"
SYNTHETIC = f"{VLLM} {SPECULATIVE}={{rejection_sample_method:synthetic}}"
CACHE = f"{ENGINE}.kv_cache_dtype"

# rule, level, words, keys, and words so near that the rule is silent
CASES: list[tuple[str, str, str, str, str]] = [
    ("raw-logprobs", "error", RAW, MODE, VLLM),
    ("raw-logprobs", "error", f"{RAW} {PLAIN}", MODE, f"{VLLM} {PLAIN}"),
    ("mixed-sources", "error", f"{RAW} {TIS}", f"importance.correction {MODE}", RAW),
    *(
        (
            "mixed-sources",
            "error",
            f"{RAW} {PLAIN} {TIS} sampling.{change}",
            f"importance.correction {MODE}",
            f"{RAW} {PLAIN} {TIS}",
        )
        for change in ("temperature=0.9", "presence_penalty=1", "min_p=0.1")
    ),
    (
        "mixed-sources",
        "error",
        f"{RAW} loss.old_logprobs=sampler",
        f"loss.old_logprobs {MODE}",
        f"{RAW} {PLAIN} loss.old_logprobs=sampler",
    ),
    (
        "mixed-sources",
        "error",
        f"{VLLM} {PLAIN} {TIS} {ARGS}.top_p=0.8",
        f"importance.correction {ARGS}.top_p",
        f"{VLLM} {TIS} sampling.top_p=0.8",
    ),
    (
        "mixed-sources",
        "error",
        f"{VLLM} {TIS} {ARGS}.min_tokens=2",
        f"importance.correction {ARGS}.min_tokens",
        f"{REPLAY} {TIS} {ARGS}.min_tokens=2",
    ),
    (
        "unfiltered-threshold",
        "error",
        f"{VLLM} {PLAIN} {BOUND} {ARGS}.top_p=0.8",
        f"importance.sequence_error_max {ARGS}.top_p",
        f"{VLLM} {PLAIN} {BOUND}",
    ),
    (
        "unfiltered-threshold",
        "error",
        f"{RAW} {BOUND}",
        f"importance.sequence_error_max {MODE}",
        f"{VLLM} {BOUND}",
    ),
    (
        "unfiltered-threshold",
        "error",
        f"{VLLM} {BOUND} {GENERATION}=auto",
        f"importance.sequence_error_max {GENERATION}",
        f"{VLLM} {GENERATION}=auto",
    ),
    ("logit-bias", "error", f"{VLLM} {ARGS}.logit_bias={{5:1.0}}", f"{ARGS}.logit_bias", VLLM),
    (
        "logit-bias",
        "error",
        f"{REPLAY} {ARGS}.logit_bias={{5:1.0}}",
        f"{ARGS}.logit_bias",
        f"{VLLM} {ARGS}.logit_bias={{}}",
    ),
    *(
        (rule, level, f"{run} {ARGS}.{name}={value}", f"{ARGS}.{name}", f"{run} {ARGS}.{name}={off}")
        for rule, name, value, off in (
            ("allowed-ids", "allowed_token_ids", "[1,2]", "null"),
            ("min-tokens", "min_tokens", "2", "0"),
        )
        for level, run in (("error", VLLM), ("error", f"{VLLM} sampling.support=audit"), ("warning", REPLAY))
    ),
    *(
        (rule, "error", f"{run} {ARGS}.{name}={value}", f"{ARGS}.{name}", f"{run} {ARGS}.{name}={off}")
        for rule, name, value, off in (
            ("bad-words", "bad_words", "[a]", "[]"),
            ("guided-decoding", "structured_outputs", "{regex:a}", "null"),
        )
        for run in (VLLM, REPLAY)
    ),
    *(
        ("custom-logits-processors", "error", f"{VLLM} {key}={value}", key, f"{VLLM} {key}={off}")
        for key, value, off in (
            (f"{ENGINE}.logits_processors", "[my.Processor]", "[]"),
            (f"{ARGS}.logits_processors", "[my.Processor]", "null"),
            (f"{ARGS}.extra_args", "{a:1}", "{}"),
        )
    ),
    *(
        ("forced-tokens", "error", f"{VLLM} {key}={value}", key, f"{VLLM} {key}=null")
        for key, value in (
            (f"{ARGS}.thinking_token_budget", "9"),
            (f"{ARGS}.trace_decode_token_ids", "[1]"),
            (f"{ARGS}.watermarking", "true"),
            (f"{ENGINE}.watermark_config", "{a:1}"),
        )
    ),
    (
        "stop-strings",
        "error",
        f"{VLLM} {ARGS}.stop=[END] {ARGS}.include_stop_str_in_output=true",
        f"{ARGS}.stop {ARGS}.include_stop_str_in_output",
        f"{VLLM} {ARGS}.stop=[]",
    ),
    *(
        ("engine-numbers", "warning", f"{VLLM} {key}={value}", key, f"{VLLM} {key}={value} {TIS}")
        for key, value in (
            (f"{ENGINE}.quantization", "fp8"),
            (CACHE, "fp8"),
            (CACHE, "bfloat16"),
        )
    ),
    *(
        ("other-model", "error", f"{VLLM} {key}={value}", key, f"{VLLM} {key}=null")
        for key, value in ((f"{ENGINE}.hf_overrides", "{a:1}"), (f"{ENGINE}.hf_config_path", "/mnt/x"))
    ),
    (
        "engine-numbers",
        "warning",
        f"{VLLM} {CACHE}=bfloat16",
        CACHE,
        f"{VLLM} {CACHE}=bfloat16 model.dtype=bfloat16",
    ),
    ("engine-numbers", "warning", f"{VLLM} {CACHE}=fp8", CACHE, f"{VLLM} {CACHE}=auto"),
    ("speculative-decoding", "warning", DRAFT, SPECULATIVE, VLLM),
    ("speculative-decoding", "error", SYNTHETIC, SPECULATIVE, VLLM),
    (
        "speculative-decoding",
        "error",
        f"{DRAFT} sampling.min_p=0.1",
        f"{SPECULATIVE} sampling.min_p",
        f"{VLLM} sampling.min_p=0.1",
    ),
    ("generation-config", "error", f"{VLLM} {GENERATION}=auto", GENERATION, f"{VLLM} {GENERATION}=vllm"),
    (
        "generation-config",
        "error",
        f"{VLLM} {GENERATION}=vllm {ENGINE}.override_generation_config={{top_p:0.8}}",
        f"{ENGINE}.override_generation_config",
        f"{VLLM} {ENGINE}.enable_prefix_caching=true",
    ),
    (
        "tiny-temperature",
        "warning",
        "sampling.temperature=0.001",
        "sampling.temperature",
        "sampling.temperature=0.01",
    ),
    ("engine-ties", "warning", f"{VLLM} sampling.ties=all", "sampling.ties", "sampling.ties=all"),
    (
        "engine-ties",
        "warning",
        f"{VLLM} sampling.ties=all",
        "sampling.ties",
        f"{VLLM} {PLAIN} sampling.ties=all",
    ),
    *(
        (
            "replay-without-mask",
            "error",
            f"sampling.support={support}",
            "sampling.support rollout.engine",
            f"{VLLM} sampling.support={support}",
        )
        for support in ("replay", "audit")
    ),
]


@pytest.mark.parametrize(("rule", "level", "words", "keys", "near"), CASES)
def test_a_rule_speaks_is_silent_and_is_satisfied_by_its_fix(rule, level, words, keys, near):
    (finding,) = found_by(rule, words.split())
    assert (finding.level, finding.keys) == (level, tuple(keys.split()))
    assert not found_by(rule, near.split())
    assert not found_by(rule, after_fix(words.split(), finding.fix)), finding.fix


@pytest.mark.parametrize("case", [case for case in CASES if VLLM in case[2]], ids=lambda case: case[2])
def test_the_embedded_sampler_reads_no_argument_of_vllm(case):
    """Such a key is refused at load for doing nothing; nothing else is said of it."""
    rule, _, words, *_ = case
    assert not found_by(rule, [word for word in words.split() if word != VLLM])


UNSEEN = (
    *("logit-bias", "bad-words", "guided-decoding", "allowed-ids", "min-tokens"),
    *("custom-logits-processors", "forced-tokens", "generation-config"),
)


@pytest.mark.parametrize(
    ("words", "keys"),
    [(words, keys) for rule, level, words, keys, _ in CASES if (rule in UNSEEN and level == "error")],
)
def test_what_only_the_sampler_draws_with_mixes_the_sources(words, keys):
    """Whatever it is, a weight against the sampler's logprobs is off too, and says so."""
    (finding,) = found_by("mixed-sources", [*words.split(), *TIS.split()])
    assert finding.keys == ("importance.correction", *keys.split())


def test_every_rule_is_triggered_at_every_level_that_the_page_gives():
    said = {rule: set() for rule in (kebab_case(rule.__name__) for rule in LINT_RULES)}
    for rule, level, *_ in CASES:
        said[rule].add(level)
    assert said == {rule: levels for rule, levels in page_rules().items() if rule in said}


def test_the_page_lists_exactly_the_rules():
    names = [kebab_case(rule.__name__) for rule in (*LINT_RULES, *ROLLOUT_RULES)]
    assert list(page_rules()) == names


def page_rules() -> dict[str, set[str]]:
    """Rule -> levels, from the tables of the page."""
    text = ROOT.joinpath("docs/linting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\w, ]+) \|.+\|.+\|$", text, flags=re.MULTILINE)
    return {rule: set(levels.split(", ")) for rule, levels in rows}


@pytest.mark.parametrize("path", sorted(config_folder().glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("words", [[], [VLLM]])
def test_shipped_configs_have_nothing_to_say_about(path, words):
    assert findings(words, path.stem) == []


@pytest.mark.parametrize(
    "words",
    [
        "sampling.top_k=null sampling.top_p=0.9",
        "loss.kl_coef=0.1",
        f"loss.old_logprobs=sampler {ARGS}.skip_reading_prefix_cache=true",
        f"rollout.one_step_off=true {TIS}",
        f"sampling.support=audit {TIS} {BOUND}",
        "sampling.repetition_penalty=1.1 sampling.min_p=0.05",
    ],
)
def test_what_is_right_with_vllm_is_left_alone(words):
    """Also: a top-p without a top-k, and a reference KL under truncation."""
    assert findings([VLLM, *words.split()]) == []


def test_errors_come_first_and_all_refusals_are_told():
    """`rlcore train` stops at the first of them."""
    words = f"{RAW} sampling.ties=all {ARGS}.top_p=0.8 {ARGS}.temperature=0.5 model.fused_head=true"
    found = findings(
        [*words.split(), "sampling.presence_penalty=1", "loss.ratio_clip_c=0.5", "train.stepz=3"]
    )
    assert [(finding.level, finding.rule) for finding in found] == [
        ("error", "unknown-key"),
        ("error", "fused-head"),
        ("error", "dual-clip"),
        ("error", "unseen-truncation"),
        ("error", "unseen-temperature"),
        ("error", "raw-logprobs"),
        ("warning", "engine-ties"),
    ]
    assert found[0].keys == ("train.stepz",) and "train.steps" in found[0].fix


def test_an_error_of_a_later_rule_comes_before_a_warning():
    found = findings(["sampling.temperature=0.001", "sampling.support=replay"])
    assert [finding.rule for finding in found] == ["replay-without-mask", "tiny-temperature"]


def test_a_value_out_of_range_is_told_alone():
    """The other rules' arithmetic stands on it."""
    found = findings(["parallel.tp=0", "loss.ratio_clip_c=0.5"])
    assert [(finding.rule, finding.keys) for finding in found] == [("ranges", ("parallel.tp",))]


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (["nproc=6"], ["processes"]),
        (["nproc=1"], []),
        (["nproc=1", "parallel.tp=1", "parallel.pp=1", "train.microbatch_size=48"], ["processes"]),
    ],
)
def test_the_number_of_processes_is_judged_where_the_config_says_it(words, rules):
    """The demo cuts its model over four; one process is then a launcher's business."""
    assert [finding.rule for finding in findings(words)] == rules
