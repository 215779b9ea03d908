"""Logits of a real model where it drew tokens itself: SmolLM2 after reasoning-gym prompts, through
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

DATASETS = ("basic_arithmetic", "chain_sum", "spell_backward", "number_sorting")
NEW_TOKENS = 32
SEED = 0


def real_logits(model_path: Path, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, V]` float32 logits at the positions of drawn tokens, and the tokens `[T]`, T = `num_tokens`.

    Prompts go through the model's chat template; tokens are drawn at temperature 1 without truncation, so
    some lie outside a truncated support, as they do when trainer and sampler disagree.
    """
    import reasoning_gym
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    num_prompts = -(-num_tokens // NEW_TOKENS)
    questions = []
    for index in range(num_prompts):
        dataset = reasoning_gym.create_dataset(DATASETS[index % len(DATASETS)], size=num_prompts, seed=SEED)
        questions.append([{"role": "user", "content": dataset[index]["question"]}])
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = tokenizer.apply_chat_template(questions, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(SEED)
    drawn = model.generate(
        **inputs,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(drawn.logits, dim=1).flatten(0, 1).float()
    ids = drawn.sequences[:, -NEW_TOKENS:].flatten()
    return logits[:num_tokens].contiguous(), ids[:num_tokens].contiguous()
