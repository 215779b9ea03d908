"""The typed run config: the only place that knows defaults. The rules that span fields are in `config_rules`.

`load_run_config` turns a plain nested mapping (hydra's output) into a frozen `RunConfig`. Unknown keys, wrong
types and contradictions raise `ConfigError` (a `ValueError`) that names the key as typed on the command line
and the fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.config_parse import parse_dataclass
from rlcore.config_rollout import RolloutConfig, SamplingConfig, TaskConfig
from rlcore.config_rules import check_run_config


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder, or an architecture trained from scratch (Llama, Qwen2, Mixtral)."""

    hf_path: str | None = None
    """Folder with config.json and safetensors. When set, the architecture fields below must stay unset."""
    vocab_size: int | None = None
    """Real vocabulary size. From scratch: None takes the task's."""
    num_layers: int | None = None
    """Transformer layers of the whole model."""
    hidden_size: int | None = None
    """Width D."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_query_groups: int | None = None
    """Key/value heads; None: as many as query heads."""
    ffn_hidden_size: int | None = None
    """Width of the SwiGLU layer."""
    num_moe_experts: int | None = None
    """Experts of every layer (Mixtral); None: a dense model."""
    moe_router_topk: int | None = None
    """Experts that each token takes, at least 2; with `num_moe_experts` only."""
    moe_ffn_hidden_size: int | None = None
    """Width of one expert's SwiGLU layer; None: `ffn_hidden_size`."""
    max_position_embeddings: int | None = None
    """Longest sequence, in tokens."""
    tie_word_embeddings: bool | None = None
    """Does the output head share the input embedding's weight?"""
    qkv_bias: bool | None = None
    """Bias on the QKV projection (Qwen2) or not (Llama)."""
    rope_theta: float | None = None
    """Base of the rotary embedding."""
    rms_norm_eps: float | None = None
    """Added to the mean square inside RMSNorm."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and activation dtype. The op and the loss are float32 whatever this says."""
    fused_head: bool = False
    """Score tokens from hidden states and the head's weight: logits exist one chunk of tokens at a time, and
    training computes each chunk's gradient beside them, so they are never stored.
    """
    fused_head_tokens: int = 1024
    """Tokens in such a chunk."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model replica is cut. Data parallel size is what the number of processes leaves over."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size."""
    vpp: int = 1
    """Virtual stages a pipeline rank (needs pp > 1): each rank holds so many pieces of the model, and
    microbatches take turns on them (Megatron's interleaved schedule), in groups of pp.
    """
    cp: int = 1
    """Context parallel size: ranks that share each sequence (needs train.token_budget)."""
    ep: int = 1
    """Expert parallel size: shares that each layer's experts are cut into, over ranks of data x context
    parallel. TP cuts experts as it cuts everything else.
    """
    sequence_parallel: bool = False
    """Shard activations outside attention and MLP over TP ranks (needs tp > 1; experts with TP need it)."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    backend: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` runs Megatron-core on gloo; `auto` takes CUDA where there is a device."""
    timeout_s: float = 600.0
    """A collective that waits longer than this many seconds is an error on the waiting rank."""

    @property
    def sp_size(self) -> int:
        """What sequence parallelism cuts tokens by: tp; 1 without it."""
        return self.tp if self.sequence_parallel else 1

    @property
    def microbatch_multiple(self) -> int:
        """Microbatches of a step come in multiples of this: of pp with virtual stages."""
        return self.pp if self.vpp > 1 else 1


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: Literal["grpo", "rloo", "reinforce_pp"] = "grpo"
    """`grpo`: reward minus the group mean, over the group's sample standard deviation. `rloo`: reward minus
    the mean of the group's other rewards. `reinforce_pp`: reward per token, whitened over all response tokens
    of the step.
    """
    normalize_std: bool | None = None
    """`grpo` only: divide by the group's standard deviation (Bessel); None: yes. The others leave no choice.
    """
    leave_one_out: bool = False
    """`grpo` only: mean and deviation are those of the group's other samples."""
    drop_equal_groups: bool = False
    """Samples of a group whose raw rewards are all equal leave the step and every denominator (DAPO)."""
    mask_truncated: bool = False
    """Samples whose response did not end by itself leave the step, every denominator and their group's
    statistics (DAPO's overlong filtering).
    """

    @property
    def divides_by_std(self) -> bool:
        """Does `grpo` divide by a standard deviation?"""
        return self.estimator == "grpo" and self.normalize_std is not False


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The objective: a policy-gradient term, and terms beside it that are off by default."""

    policy: Literal["clip", "gspo", "cispo", "reinforce", "on_policy"] = "clip"
    """`clip`: PPO/GRPO/DAPO. `gspo`: the same with one ratio per sequence. `cispo`: the ratio is a clipped,
    detached weight. `reinforce`: -advantage x logprob. `on_policy`: gradient of the ratio at 1.
    """
    ratio_clip_min: float = 0.2
    """Epsilon below: the ratio is clipped at 1 - ratio_clip_min."""
    ratio_clip_max: float = 0.2
    """Epsilon above: the ratio is clipped at 1 + ratio_clip_max."""
    ratio_clip_c: float | None = None
    """Dual clip, above 1: with a negative advantage a token's loss is at most -c x advantage. `clip` and
    `gspo` only.
    """
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed_length"] = (
        "token_mean"
    )
    """How token losses become one number; every mean is over the whole step and all ranks."""
    fixed_length: int | None = None
    """Tokens that `fixed_length` divides each sequence's sum by (Dr.GRPO), such as the length limit."""
    actor_denominator: Literal["retained", "valid", "retained_exact"] = "retained"
    """`retained`: token & sample & keep_old. `valid`: token & sample. `retained_exact`: also without the
    tokens that only the current policy drops, counted by Megatron after the last forward.
    """
    old_logprobs: Literal["recompute", "sampler", "skip"] = "recompute"
    """`recompute`: a scoring pass before the update. `sampler`: the rollout engine's own numbers instead, and
    no such pass; the ratio then carries what the two engines differ by, which nothing measures (no
    `mismatch/...` of the two), and a token without a finite number leaves the loss as outside the old
    support. `skip`: none; for `on_policy` and `reinforce`, which have no ratio.
    """
    kl_coef: float = 0.0
    """Weight of the reference KL (on unfiltered logprobs). 0 loads no reference policy."""
    kl_type: Literal["k1", "k2", "k3", "abs", "mse"] = "k3"
    """KL estimator; see `rlcore/ops/kl.py`."""
    kl_gradient: Literal["score", "plain"] = "score"
    """`score`: with the score-function term. `plain`: the value's own derivative. Not for `kl_in=reward`."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: a term beside the policy's. `reward`: the sum over a response is taken from its reward."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the exact entropy of the distribution that is sampled from."""
    positive_nll_coef: float = 0.0
    """Weight of -logprob over the tokens with a positive advantage, over their number (VAPO)."""
    entropy_metric: bool = False
    """Also report the exact entropy, filtered and unfiltered."""


@dataclass(frozen=True, kw_only=True)
class ImportanceConfig:
    """Corrections for a sampler whose numbers are not the trainer's: weights exp(old - sampler), detached."""

    correction: Literal["none", "tis", "icepop", "seq_mask_tis", "sequence", "geometric"] = "none"
    """`tis`: token weights up to `cap`. `icepop`: tokens outside [`low`, `high`] leave the loss.
    `seq_mask_tis`: whole sequences outside [`low`, `high`] do. `sequence`, `geometric`: one weight per
    sequence, exp of the sum or of the mean, up to `cap`.
    """
    low: float | None = None
    """Smallest weight that stays: `icepop`, `seq_mask_tis`."""
    high: float | None = None
    """Largest weight that stays: `icepop`, `seq_mask_tis`."""
    cap: float | None = None
    """Largest weight: `tis`, `sequence`, `geometric`, and `seq_mask_tis` unless `raw`."""
    raw: bool = False
    """`seq_mask_tis` only: token weights without a cap, still finite."""
    statistic: Literal["geometric", "sum"] = "geometric"
    """What `seq_mask_tis` judges a sequence by: exp of the mean log weight, or of the sum."""
    sequence_error_max: float | None = None
    """Sequences whose mean of exp|sampler - old| is above this leave the step; None: no check. 1 is perfect
    agreement.
    """


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Megatron's Adam."""

    lr: float = 1e-6
    """Peak learning rate."""
    min_lr: float = 0.0
    """Final learning rate of the schedule."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_beta1: float = 0.9
    """First-moment decay."""
    adam_beta2: float = 0.95
    """Second-moment decay."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient-norm clip; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps and batches."""

    steps: int = 100
    """Rollout + update steps."""
    microbatch_size: int = 8
    """Sequences per forward on one rank."""
    token_budget: int | None = None
    """Pack sequences into rows of at most this many tokens a microbatch, over all context-parallel ranks;
    `microbatch_size` then plays no part. None: padded rows of `microbatch_size` sequences.
    """
    check_loss_scale: bool = True
    """Before the first step, run a toy loss through the schedule and compare its gradient with the closed
    form: a loss scaled wrongly is an error, not a worse run.
    """
    minibatch_size: int | None = None
    """Sequences per optimizer step over the whole run; None: all of a step's."""
    epochs: int = 1
    """Passes over one step's rollouts."""
    max_refused_updates: int = 0
    """Updates in a row that may be refused for NaN or inf before the run ends with an error. A refused update
    leaves weights and optimizer untouched.
    """
    log_samples: int = 2
    """Responses of each step that are written to `samples.jsonl`: text, reward, logprobs of each token; 0:
    none.
    """
    save_every: int = 0
    """Write the policy as a Hugging Face folder every this many steps; 0: never (but see `save_final`)."""
    save_final: bool = False
    """Write the policy as a Hugging Face folder after the last step."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    seed: int = 0
    """Seeds weights, prompts and sampling; from 0 to 2^32 - 1."""
    run_dir: str = "runs/default"
    """Config, metrics, pictures and weights go here."""
    nproc: int = 1
    """Processes that `rlcore train` starts when it is not already under torchrun. `--nproc` wins; the run
    folder keeps the number that ran."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """The distribution."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Responses."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """Prompts and rewards."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantages."""
    loss: LossConfig = field(default_factory=LossConfig)
    """The objective."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Corrections for the sampler's numbers."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""

    @property
    def sequences_per_step(self) -> int:
        """Responses drawn per step over the whole run."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt


def load_run_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked `RunConfig` from a plain nested mapping. Raises `ConfigError` naming the key."""
    config = parse_dataclass(RunConfig, values)
    check_run_config(config)
    return config


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The config as plain nested dicts, every default filled in (what the run folder keeps)."""
    return dataclasses.asdict(config)
