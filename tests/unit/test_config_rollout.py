"""The rules of the rollout section, as typed on the command line: refused at load, and by the linter's name
(B50, B06, B07)."""

from __future__ import annotations

import pytest

from rlcore.cli.compose import compose_run_config
from rlcore.config import load_run_config
from rlcore.config_parse import ConfigError
from rlcore.config_rules_rollout import ROLLOUT_RULES, is_http_url
from rlcore.lint_finding import kebab_case
from tests.lint_cases import ARGS, ENGINE, TIS, VLLM, after_fix, found_by, values_of

URLS = f"{VLLM} rollout.vllm.urls=[http://node7:8000]"
AHEAD = f"{VLLM} rollout.one_step_off=true"
AUTO = "parallel.backend=auto"

# rule, words, start of the message, and words so near that they load; None: those that the fix gives
REFUSED: list[tuple[str, str, str, str | None]] = [
    (
        "rollout-ranges",
        f"{VLLM} rollout.vllm.start_timeout_s=0",
        "rollout.vllm.start_timeout_s=0.0: expected seconds above 0, at most 1e9",
        f"{VLLM} rollout.vllm.start_timeout_s=1e9",
    ),
    (
        "rollout-ranges",
        f"{VLLM} rollout.vllm.timeout_s=2e9",
        "rollout.vllm.timeout_s=2000000000.0: expected seconds",
        f"{VLLM} rollout.vllm.timeout_s=0.5",
    ),
    (
        "rollout-ranges",
        f"{VLLM} rollout.vllm.retries=-1",
        "rollout.vllm.retries=-1: expected a count of at least 0",
        f"{VLLM} rollout.vllm.retries=0",
    ),
    *(
        (
            "vllm-unused",
            f"rollout.vllm.{key}={value}",
            f"rollout.vllm.{key}={shown} does nothing under rollout.engine=policy. Set rollout.engine=vllm",
            None,
        )
        for key, value, shown in (
            ("retries", "2", "2"),
            ("urls", "[http://a]", "('http://a',)"),
            ("logprobs_mode", "raw_logprobs", "raw_logprobs"),
            ("sampling_args", "{skip_clone:true}", "{'skip_clone': True}"),
            ("transfer", "folder", "folder"),
            ("max_model_len", "64", "64"),
        )
    ),
    (
        "server-urls",
        f"{VLLM} rollout.vllm.urls=[node7:8000]",
        "rollout.vllm.urls=['node7:8000']: 'node7:8000' is no address of a server. Set addresses such as",
        URLS,
    ),
    (
        "server-urls",
        f"{VLLM} rollout.vllm.urls=[http://node7:8000,http://node7:8000/]",
        "rollout.vllm.urls=['http://node7:8000', 'http://node7:8000/'] names a server twice",
        f"{VLLM} rollout.vllm.urls=[http://node7:8000,http://node8:8000]",
    ),
    (
        "engine-args-of-servers",
        f"{URLS} {ENGINE}.enforce_eager=true",
        "rollout.vllm.engine_args={'enforce_eager': True} does nothing with rollout.vllm.urls",
        f"{VLLM} {ENGINE}.enforce_eager=true",
    ),
    (
        "transfer",
        f"{URLS} {AUTO} rollout.vllm.transfer=ipc",
        "rollout.vllm.transfer=ipc shares GPU memory with an engine of this run's own",
        None,
    ),
    (
        "transfer",
        f"{VLLM} rollout.vllm.transfer=nccl",
        "rollout.vllm.transfer=nccl goes from GPU to GPU, and parallel.backend=cpu keeps",
        None,
    ),
    (
        "transfer",
        f"{URLS} {AUTO} rollout.vllm.urls=[http://a:1,http://b:1] rollout.vllm.transfer=nccl",
        "rollout.vllm.transfer=nccl goes to one server, and rollout.vllm.urls names 2",
        None,
    ),
    (
        "transfer",
        f"{VLLM} {AUTO} rollout.vllm.transfer=ipc rollout.vllm.transfer_folder=/mnt/x",
        "rollout.vllm.transfer_folder=/mnt/x does nothing under rollout.vllm.transfer=ipc. Set",
        None,
    ),
    (
        "max-model-len",
        f"{VLLM} rollout.vllm.max_model_len=4",
        "rollout.vllm.max_model_len=4 leaves no room for a prompt beside rollout.max_new_tokens=4",
        f"{VLLM} rollout.vllm.max_model_len=5",
    ),
    *(
        (
            "owned-engine-args",
            f"{VLLM} {ENGINE}.{name}={value}",
            f"{ENGINE}.{name}={value}: {said}. Remove {ENGINE}.{name}",
            None,
        )
        for name, value, said in (
            ("model", "x", "that is model.hf_path here"),
            ("dtype", "bfloat16", "that is model.dtype here"),
            ("seed", "3", "that is seed here"),
            ("max_model_len", "99", "that is rollout.vllm.max_model_len here"),
            ("logprobs_mode", "raw_logprobs", "that is rollout.vllm.logprobs_mode here"),
            ("max_logprobs", "5", "the run sets it itself"),
            ("worker_extension_cls", "x", "the run sets it itself"),
        )
    ),
    *(
        (
            "owned-sampling-args",
            f"{VLLM} {ARGS}.{name}={value}",
            f"{ARGS}.{name}={value}: {said}. Remove {ARGS}.{name}",
            None,
        )
        for name, value, said in (
            ("n", "9", "that is rollout.samples_per_prompt here"),
            ("max_tokens", "9", "that is rollout.max_new_tokens here"),
            ("seed", "9", "that is seed here"),
            ("logprobs", "5", "the run sets it itself"),
            ("detokenize", "False", "the run sets it itself"),
            ("ignore_eos", "True", "the run sets it itself"),
            ("stop_token_ids", "[3]", "the run sets it itself"),
        )
    ),
    *(
        (
            rule,
            f"{VLLM} {ARGS}.{name}={value}",
            f"{ARGS}.{name}={value} reaches the sampler only",
            None,
        )
        for rule, name, value in (
            ("unseen-truncation", "top_p", "0.8"),
            ("unseen-truncation", "top_k", "5"),
            ("unseen-truncation", "min_p", "0.3"),
            ("unseen-temperature", "temperature", "0.5"),
            ("unseen-penalty", "repetition_penalty", "1.1"),
            ("unseen-penalty", "presence_penalty", "0.5"),
            ("unseen-penalty", "frequency_penalty", "0.5"),
        )
    ),
    (
        "one-step-off",
        "rollout.one_step_off=true importance.correction=tis importance.cap=2",
        "rollout.one_step_off=true draws while the policy trains, and rollout.engine=policy draws from",
        None,
    ),
    (
        "one-step-off",
        AHEAD,
        "rollout.one_step_off=true trains on responses that are one update old",
        None,
    ),
    (
        "stale-denominator",
        f"{AHEAD} loss.old_logprobs=sampler",
        "loss.old_logprobs=sampler with rollout.one_step_off=true: the sampler's logprobs are those of the "
        "weights before the last update",
        None,
    ),
    *(
        (
            "replay-top-k",
            f"{VLLM} sampling.top_k={top_k} sampling.support={support}",
            f"sampling.support={support} needs the ids that vLLM kept, which it returns only with a top-k",
            None,
        )
        for top_k, support in (("null", "replay"), ("0", "audit"))
    ),
]
# Of the loss section, about the sampler's logprobs.
SAMPLER = "loss.old_logprobs=sampler"
REFUSED += [
    (
        "sampler-as-old",
        f"{SAMPLER} {TIS}",
        "importance.correction=tis compares the sampler's logprobs with the old policy's, and loss.old_log",
        None,
    ),
    (
        "sampler-as-old",
        f"{SAMPLER} importance.sequence_error_max=1.1",
        "importance.sequence_error_max=1.1 compares the sampler's",
        None,
    ),
    (
        "sampler-as-old",
        f"{SAMPLER} loss.kl_coef=0.1 loss.kl_in=reward",
        "loss.kl_in=reward reads the old policy's unfiltered logprobs, and loss.old_logprobs=sampler",
        None,
    ),
]


@pytest.mark.parametrize(("rule", "words", "message", "near"), REFUSED)
def test_refused_under_its_rule_until_its_fix(rule, words, message, near):
    with pytest.raises(ConfigError) as caught:
        load_run_config(values_of(tuple(words.split())))
    assert str(caught.value).startswith(message)
    (finding,) = found_by(rule, words.split())
    assert finding.level == "error" and finding.reason in str(caught.value)
    assert finding.keys[0] in words and message.startswith(finding.keys[0])
    allowed = after_fix(words.split(), finding.fix) if near is None else near.split()
    load_run_config(values_of(tuple(allowed)))


def test_every_rule_refuses_something():
    assert {kebab_case(rule.__name__) for rule in ROLLOUT_RULES} < {rule for rule, *_ in REFUSED}


@pytest.mark.parametrize(
    ("url", "is_one"),
    [
        ("http://node7", True),
        ("https://node7.example:8443/vllm", True),
        ("http://[::1]:8000", True),
        ("node7:8000", False),
        ("http://", False),
        ("http://node7:port", False),
        ("http://node7:70000", False),
        ("ftp://node7", False),
        ("http://node 7", False),
        ("http://node7?x=1", False),
        ("", False),
    ],
)
def test_what_is_an_address(url, is_one):
    assert is_http_url(url) is is_one


B50 = [
    # each as typed, beside what must be named: B50's list in our keys
    ("loss.ratio_clip_mx=0.28", "loss.ratio_clip_mx: no such key. Did you mean loss.ratio_clip_max?"),
    ("loss_fn.ratio_clip_mx=0.28", "loss_fn: no such key. Did you mean loss?"),
    ("train.lr=1e-3", "train.lr: no such key."),
    ("importance.cap=2", "importance.cap=2.0 does nothing under importance.correction=none"),
    ("importance.correction=icepop importance.high=5", "importance.correction=icepop needs importance.low"),
    (
        "importance.correction=seq_mask_tis importance.low=0.9 importance.high=2 importance.cap=0.5",
        "importance.cap=0.5 is below importance.low=0.9",
    ),
    ("loss.policy=gspo", "loss.policy=gspo has one ratio per sequence, and loss.aggregation=token_mean"),
    ("loss.kl_type=k4", "loss.kl_type='k4': expected one of"),
    ("parallel.cp=2", "parallel.cp=2 cuts packed rows: set train.token_budget"),
    (f"{VLLM} {ARGS}.top_p=0.9", f"{ARGS}.top_p=0.9 reaches the sampler only"),
    ("sampling.temperature=0", "sampling.temperature=0.0 is greedy decoding"),
]


@pytest.mark.parametrize(("words", "message"), B50)
def test_b50_through_hydra(words, message):
    """CASES B50: a key that does nothing, or that contradicts another. The batch that does not divide over
    the ranks (10 over 4 x 2) is in `test_lint_command`, which has ranks; a length multiple of our own making
    is no key: packing pads to 2 x CP.
    """
    with pytest.raises(ConfigError) as caught:
        compose_run_config("demo", words.split())
    assert str(caught.value).startswith(message)
