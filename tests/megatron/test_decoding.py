"""Logits from the key/value cache equal logits of a full forward, in every layout."""

from __future__ import annotations

import pytest
import torch

from tests.rank_pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]

# 9 columns: with sequence parallelism the last call pads to 10.
ROWS, PROMPT, LENGTH = 3, 4, 9


def _decode(rank, world_size, parallel_values):
    """Decodes twice; the worst distance to full forwards and how much logits vary, on last stages."""
    from megatron_worker.chunks import parameters_of
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.decoding import MegatronDecoder
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.hf_bridge import initialize_from_seed
    from megatron_worker.model_setup import build_chunks, wrap_ddp
    from rlcore.collectives import all_gather
    from rlcore.config import ParallelConfig
    from tests.megatron.stage_runner import full_logits, tiny_architecture

    parallel = ParallelConfig(**parallel_values)
    with cpu_backend("cpu"):
        groups = initialize_parallel(parallel, "cpu")
        arch = tiny_architecture()
        bare = build_chunks(arch, parallel, "float32", groups)
        initialize_from_seed(bare, arch, 5, groups)
        with torch.no_grad():  # larger weights, so that logits differ by more than the tolerance
            for parameter in parameters_of(bare):
                parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)
        chunks = [wrap_ddp(chunk, parallel) for chunk in bare]
        bare[-1].decoder.layers[0].eval()
        training = [module.training for chunk in bare for module in chunk.modules()]
        decoder = MegatronDecoder(chunks, arch, parallel, groups)
        generator = torch.Generator().manual_seed(2)
        distances, spread = [], []
        for calls in ([PROMPT, *range(PROMPT + 1, LENGTH + 1)], [1, 2, 6, 7, LENGTH]):
            ids_sl = torch.randint(0, arch.vocab_size, (ROWS, LENGTH), generator=generator)
            decoder.start_decoding(ROWS, LENGTH)
            seen = 0
            for stop in calls:
                logits = decoder.next_logits(ids_sl[:, :stop], seen)
                seen = stop
                padded = torch.nn.functional.pad(ids_sl[:, :stop], (0, stop % 2))
                expected = full_logits(bare, arch, groups, padded)
                assert (logits is None) == (not groups.is_last_stage)
                if logits is not None:
                    logits = torch.cat(list(all_gather(logits, groups.tp)), dim=-1)[:, : arch.vocab_size]
                    distances.append((logits - expected[:, stop - 1]).abs().max().item())
                    spread.append((expected[:, stop - 1] - expected[:, stop - 2]).abs().max().item())
        assert training == [module.training for chunk in bare for module in chunk.modules()]
        assert all(parameter.grad is None for parameter in parameters_of(bare))
        destroy_parallel()
    return (max(distances), max(spread)) if distances else None


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (1, {}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "pp": 2}),
        (2, {"tp": 2, "sequence_parallel": True}),
        (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
        (2, {"pp": 2, "vpp": 2}),
        (4, {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}),
        (4, {"pp": 4}),
    ],
    ids=["alone", "tp2", "pp2", "tp2pp2", "tp2sp", "tp2pp2sp", "pp2vpp2", "tp2pp2vpp2sp", "pp4"],
)
def test_cached_logits_equal_full_forward(world_size, parallel):
    results = [result for result in run_ranks(_decode, world_size, parallel) if result is not None]
    assert results
    for distance, spread in results:
        assert distance < 1e-5
        assert spread > 0.1


def _wrong_calls(rank, world_size):
    """Shape of the first call's logits, and the messages of wrong calls."""
    from megatron_worker.cpu_backend import cpu_backend
    from megatron_worker.decoding import MegatronDecoder
    from megatron_worker.groups import destroy_parallel, initialize_parallel
    from megatron_worker.hf_bridge import initialize_from_seed
    from megatron_worker.model_setup import build_chunks
    from rlcore.config import ParallelConfig
    from tests.megatron.stage_runner import tiny_architecture

    parallel = ParallelConfig(tp=2)
    with cpu_backend("cpu"):
        groups = initialize_parallel(parallel, "cpu")
        arch = tiny_architecture()
        (model,) = build_chunks(arch, parallel, "float32", groups)
        initialize_from_seed(model, arch, 5, groups)
        decoder = MegatronDecoder(model, arch, parallel, groups)
        decoder.start_decoding(2, 6)
        logits = decoder.next_logits(torch.zeros((2, 3), dtype=torch.int64), 0)
        messages = []
        for call in (
            lambda: decoder.start_decoding(2, arch.max_position_embeddings + 1),
            lambda: decoder.next_logits(torch.zeros((3, 4), dtype=torch.int64), 3),
            lambda: decoder.next_logits(torch.zeros((2, 7), dtype=torch.int64), 3),
            lambda: decoder.next_logits(torch.zeros((2, 3), dtype=torch.int64), 3),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            messages.append(str(caught.value))
        destroy_parallel()
    return tuple(logits.shape), messages


def test_logits_stay_sharded_and_wrong_calls_are_refused():
    for shape, messages in run_ranks(_wrong_calls, 2):
        assert shape == (2, 7)  # 13 ids padded to 14, half of them here
        assert "model.max_position_embeddings" in messages[0]
        assert all("expected 2 rows" in message for message in messages[1:])
