"""What a rollout system of yours would hand over, made up: NeMo-RL-style batches of prompts and responses."""

import torch


def rollouts(num_sequences, length, vocab_size, dp_rank):
    """Endless batches, others on each data-parallel rank. Responses are uniform ids, and that is what their
    sampler logprobs say; the reward is the share of even ids, the advantage the reward less the batch's mean.
    """
    generator = torch.Generator().manual_seed(17 + dp_rank)
    device = torch.cuda.current_device()
    positions = torch.arange(length)
    while True:
        ids = torch.randint(0, vocab_size, (num_sequences, length), generator=generator)
        prompt_lengths = torch.randint(2, length // 3, (num_sequences, 1), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (num_sequences, 1), generator=generator)
        token_mask = (positions >= prompt_lengths) & (positions < lengths)
        rewards = ((ids % 2 == 0) & token_mask).sum(dim=1) / token_mask.sum(dim=1)
        batch = {
            "input_ids": ids,
            "input_lengths": lengths[:, 0],
            "token_mask": token_mask,
            "sample_mask": torch.ones(num_sequences),
            "generation_logprobs": -torch.log(torch.full(ids.shape, float(vocab_size))),
            "advantages": (rewards - rewards.mean())[:, None].expand(ids.shape),
        }
        yield {name: tensor.to(device) for name, tensor in batch.items()}
