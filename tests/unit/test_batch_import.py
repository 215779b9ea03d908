"""NeMo-RL-style and verl-style batches: which number belongs to which token, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_worker.microbatches import split_batch
from rlcore.batch_import import from_nemo_rl, from_verl
from rlcore.ops.logprob import vocab_parallel_logprob
from rlcore.sampling import SamplingSpec

pytestmark = pytest.mark.megatron

INF, NAN = math.inf, math.nan


def nemo_rl(**changes):
    """Two rows: prompt [3, 1] and response [4, 2]; prompt [5] and response [7, 8, 9], the sample masked."""
    batch = {
        "input_ids": torch.tensor([[3, 1, 4, 2, 0], [5, 7, 8, 9, 6]]),
        "input_lengths": torch.tensor([4, 5]),
        "token_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 1, 0]]),
        "sample_mask": torch.tensor([1.0, 0.0]),
        "prev_logprobs": torch.tensor([[0.0, NAN, -0.4, -INF, INF], [0.0, -1.1, -INF, -1.3, 0.0]]),
        "generation_logprobs": torch.tensor([[0.0, NAN, -0.5, -0.6, 7.0], [0.0, -2.1, -2.2, -2.3, 0.0]]),
        "reference_policy_logprobs": torch.tensor(
            [[0.0, -9.0, -0.7, -0.8, 7.0], [0.0, -3.1, 0.0, -3.3, 0.0]]
        ),
        "advantages": torch.tensor([[9.0, 9.0, 1.5, 2.5, 9.0], [9.0, -1.0, 9.0, -2.0, 9.0]]),
    }
    return {name: value for name, value in {**batch, **changes}.items() if value is not None}


def verl(**changes):
    """The same two rows without the last id: P = 3, R = 3; the 8 is a tool's token."""
    batch = {
        "prompts": torch.tensor([[0, 3, 1], [0, 0, 5]]),
        "responses": torch.tensor([[4, 2, 0], [7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "old_log_probs": torch.tensor([[-0.4, -INF, NAN], [-1.1, -INF, -1.3]]),
        "rollout_log_probs": torch.tensor([[-0.5, -0.6, 7.0], [-2.1, -2.2, -2.3]]),
        "ref_log_prob": torch.tensor([[-0.7, -0.8, 7.0], [-3.1, 0.0, -3.3]]),
        "advantages": torch.tensor([[1.5, 2.5, 9.0], [-1.0, 9.0, -2.0]]),
    }
    return {name: value for name, value in {**batch, **changes}.items() if value is not None}


def check_values(batch):
    """The four first columns of the hand-made batch, in our form."""
    assert batch.ids_sl[:, :4].tolist() == [[3, 1, 4, 2], [5, 7, 8, 9]]
    assert batch.token_mask_sl[:, :4].tolist() == [[False, False, True, True], [False, True, False, True]]
    expected = {
        "old_logprob": [[0, 0, -0.4, -INF], [0, -1.1, 0, -1.3]],
        "sampler_logprob": [[0, 0, -0.5, -0.6], [0, -2.1, 0, -2.3]],
        "reference_logprob": [[0, 0, -0.7, -0.8], [0, -3.1, 0, -3.3]],
        "advantage": [[0, 0, 1.5, 2.5], [0, -1.0, 0, -2.0]],
    }
    for name, values in expected.items():
        value_sl = getattr(batch, f"{name}_sl")
        assert torch.equal(value_sl[:, :4], torch.tensor(values, dtype=torch.float32)), name
        assert not value_sl[:, 4:].any(), name
    # Only a -inf that the loss would read says that a token left the support.
    assert batch.keep_old_sl[:, :4].tolist() == [[True, True, True, False], [True] * 4]
    assert not batch.token_mask_sl[:, 4:].any() and batch.keep_old_sl[:, 4:].all()


def test_nemo_rl_values_per_token():
    given = nemo_rl()
    copies = {name: value.clone() for name, value in given.items()}
    batch = from_nemo_rl(given)
    check_values(batch)
    assert batch.length_s.tolist() == [4, 5] and batch.sample_mask_s.tolist() == [True, False]
    assert batch.ids_sl[1, 4] == 6, "a real token after the last response token stays"
    for name, value in copies.items():
        assert torch.equal(given[name].nan_to_num(5.0), value.nan_to_num(5.0)), f"{name} was changed"


def test_verl_values_per_token():
    given = verl()
    copies = {name: value.clone() for name, value in given.items()}
    batch = from_verl(given)
    check_values(batch)
    assert batch.ids_sl.shape == (2, 4), "left padding is gone"
    assert batch.length_s.tolist() == [4, 4] and batch.sample_mask_s.tolist() == [True, True]
    for name, value in copies.items():
        assert torch.equal(given[name].nan_to_num(5.0), value.nan_to_num(5.0)), f"{name} was changed"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_masks_mean_the_same_in_any_dtype(dtype):
    ours = nemo_rl()
    masks = {name: ours[name].to(dtype) for name in ("token_mask", "sample_mask")}
    check_values(from_nemo_rl(nemo_rl(**masks)))
    theirs = verl()
    check_values(
        from_verl(verl(**{name: theirs[name].to(dtype) for name in ("attention_mask", "response_mask")}))
    )


def test_input_ids_stand_in_for_prompts():
    whole = torch.cat([verl()["prompts"], verl()["responses"]], dim=1)
    check_values(from_verl(verl(prompts=None, input_ids=whole)))
    check_values(from_verl(verl(input_ids=whole)))


def test_a_sample_mask_may_be_spread_over_the_columns():
    mask_sl = torch.tensor([[1.0], [0.0]]).expand(2, 5)
    assert from_nemo_rl(nemo_rl(sample_mask=mask_sl)).sample_mask_s.tolist() == [True, False]


def test_without_lengths_a_row_ends_with_its_last_response_token():
    """A row without response tokens is real to its last column."""
    mask_sl = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    assert from_nemo_rl(nemo_rl(input_lengths=None, token_mask=mask_sl)).length_s.tolist() == [4, 5]


@pytest.mark.parametrize("load", [from_nemo_rl, from_verl])
def test_what_is_optional_stays_out(load):
    names = ("prev_logprobs", "reference_policy_logprobs") if load is from_nemo_rl else ("old_log_probs",)
    names = names if load is from_nemo_rl else (*names, "ref_log_prob")
    given = (nemo_rl if load is from_nemo_rl else verl)(**dict.fromkeys(names))
    batch = load(given)
    assert batch.old_logprob_sl is None and batch.keep_old_sl is None and batch.reference_logprob_sl is None


def b16_nemo_rl():
    logprob_sl = torch.tensor([[0.0, -0.904832, -0.432653, -0.904832]])
    return from_nemo_rl(
        {
            "input_ids": torch.tensor([[3, 1, 4, 2]]),
            "token_mask": torch.tensor([[0, 0, 1, 1]]),
            "sample_mask": torch.ones(1),
            "prev_logprobs": logprob_sl,
            "generation_logprobs": logprob_sl,
            "advantages": torch.ones(1, 4),
        }
    )


def b16_verl():
    logprob_sr = torch.tensor([[-0.432653, -0.904832]])
    return from_verl(
        {
            "prompts": torch.tensor([[0, 0, 3, 1]]),
            "responses": torch.tensor([[4, 2]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]),
            "response_mask": torch.ones(1, 2),
            "old_log_probs": logprob_sr,
            "rollout_log_probs": logprob_sr,
            "advantages": torch.ones(1, 2),
        }
    )


@pytest.mark.parametrize("batch_of", [b16_nemo_rl, b16_verl])
def test_b16_logprob_token_and_mask_line_up(batch_of):
    """Imported, cut and scored: the trainer's own logprob and the imported one are of the same tokens, and
    their masked sum is -1.337485; one place to the left gives -0.904832, no shift -5.086444.
    """
    (microbatch,) = split_batch(batch_of(), 1)
    logits_tv = torch.zeros(4, 5)
    logits_tv[0, 1], logits_tv[1, 4], logits_tv[2, 2], logits_tv[3, 0] = 1, 2, 1, 3
    scores = vocab_parallel_logprob(logits_tv, microbatch.target_t, SamplingSpec(), None)
    mask_t = microbatch.token_mask_t
    for value_t in (scores.logprob_t, microbatch.old_logprob_t, microbatch.sampler_logprob_t):
        assert value_t is not None
        assert value_t[mask_t].tolist() == pytest.approx([-0.432653, -0.904832], abs=1e-5)
        assert float(value_t[mask_t].sum()) == pytest.approx(-1.337485, abs=1e-5)
    assert microbatch.advantage_t[mask_t].tolist() == [1.0, 1.0]


NEMO_RL_ERRORS = [
    ({"token_mask": None}, "lacks token_mask.*Needed: input_ids, token_mask, sample_mask, generation"),
    ({"advantages": torch.zeros(2, 4)}, r"advantages has shape \(2, 4\).*must be \(2, 5\)"),
    ({"prev_logprobs": torch.zeros(2)}, r"prev_logprobs has shape \(2,\)"),
    ({"input_ids": torch.zeros(5).long()}, r"input_ids has shape \(5,\): expected \[sequences"),
    ({"input_ids": torch.zeros(0, 5).long()}, r"input_ids has shape \(0, 5\): expected at least one"),
    ({"input_ids": torch.zeros(2, 5)}, "input_ids is torch.float32: expected integers"),
    ({"generation_logprobs": torch.zeros(2, 5).long()}, "generation_logprobs is torch.int64: expected float"),
    ({"generation_logprobs": [[0.0]]}, "generation_logprobs is a list: expected a tensor"),
    (
        {"token_mask": torch.tensor([[0, 0, 1, 1, 0], [0, 1, 2, 0, 0]])},
        "token_mask holds 2 at row 1, column 2",
    ),
    ({"token_mask": torch.full((2, 5), NAN)}, "token_mask holds nan at row 0, column 0"),
    ({"token_mask": torch.tensor([[0, 1, 1, 0, 0], [1, 1, 0, 1, 0]])}, "token_mask of row 1 marks its first"),
    ({"sample_mask": torch.tensor([1.0, 0.5])}, "sample_mask holds 0.5 at row 1"),
    ({"sample_mask": torch.ones(3)}, r"sample_mask has shape \(3,\).*\(2,\)"),
    ({"sample_mask": torch.tensor([[1] * 5, [1, 1, 0, 1, 1]])}, "sample_mask of row 1 is not the same"),
    ({"input_lengths": torch.tensor([4, 3])}, "token_mask of row 1 marks column 3.*row has 3"),
    ({"input_lengths": torch.tensor([6, 5])}, "input_lengths of row 0 is 6: expected 1 to 5"),
    ({"input_lengths": torch.tensor([4, 0])}, "input_lengths of row 1 is 0"),
    ({"input_lengths": torch.tensor([4.0, 5.0])}, "input_lengths is torch.float32: expected integers"),
]

VERL_ERRORS = [
    ({"prompts": None}, "lacks prompts or input_ids. Needed: responses, .*prompts or input_ids"),
    ({"rollout_log_probs": None}, "lacks rollout_log_probs"),
    ({"advantages": torch.zeros(2, 6)}, r"advantages has shape \(2, 6\).*must be \(2, 3\)"),
    ({"old_log_probs": torch.zeros(2, 6)}, r"old_log_probs has shape \(2, 6\).*must be \(2, 3\)"),
    ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \(2, 5\).*must be \(2, 6\)"),
    ({"prompts": torch.zeros(3, 3).long()}, r"prompts has shape \(3, 3\).*2 rows"),
    ({"input_ids": torch.zeros(2, 5).long()}, r"input_ids has shape \(2, 5\).*must be \(2, 6\)"),
    ({"input_ids": torch.zeros(2, 6).long()}, "input_ids of row 0 does not end with its prompts and resp"),
    ({"prompts": None, "input_ids": torch.zeros(2, 2).long()}, r"input_ids has shape \(2, 2\).*3 columns"),
    (
        {"response_mask": torch.tensor([[1, 1, 1], [1, 0, 1]])},
        "response_mask of row 0 marks response token 2",
    ),
    ({"response_mask": torch.tensor([[1, 1, 0], [1, -1, 1]])}, "response_mask holds -1 at row 1, column 1"),
    (
        {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1]])},
        "attention_mask of row 1 has padding between its real tokens",
    ),
    (
        {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]])},
        "attention_mask of row 0 has no prompt token",
    ),
    (
        {
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [0] * 6]),
            "response_mask": torch.tensor([[1, 1, 0], [0] * 3]),
        },
        "attention_mask of row 1 has no real token",
    ),
]


@pytest.mark.parametrize(("changes", "message"), NEMO_RL_ERRORS)
def test_what_is_wrong_with_a_nemo_rl_batch_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        from_nemo_rl(nemo_rl(**changes))


@pytest.mark.parametrize(("changes", "message"), VERL_ERRORS)
def test_what_is_wrong_with_a_verl_batch_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        from_verl(verl(**changes))


def test_a_response_may_be_empty():
    """A row of prompt alone: nothing of it trains, and its tokens stay."""
    changes = {
        "attention_mask": torch.tensor([[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]]),
        "response_mask": torch.tensor([[0, 0, 0], [1, 0, 1]]),
    }
    batch = from_verl(verl(**changes))
    assert batch.length_s.tolist() == [2, 4] and batch.ids_sl[0].tolist() == [3, 1, 0, 0]
    assert batch.token_mask_sl.sum(dim=1).tolist() == [0, 2]
