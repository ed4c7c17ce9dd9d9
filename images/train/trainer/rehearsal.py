"""A base model's own answers to general prompts, to be mixed into its training (self-synthesised rehearsal).

Source: Huang et al. 2024, Mitigating Catastrophic Forgetting in Large Language Models with Self-Synthesized Rehearsal.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from refit import files
from refit.errors import BadInput
from refit.store import store_for
from trainer.machine import BFLOAT16_FLAGS, flags
from trainer.objective import load

BATCH = 32


def rehearse(base: str, prompts: Path, output: Path, *, max_tokens: int) -> dict[str, Any]:
    """Ask `base` every line of `prompts`; write its answers to `output` as JSON lines of messages.

    Answers are greedy. One that is empty or not finished within `max_tokens` is left out: half a sentence would teach
    the model to stop there.

    Raises:
        BadInput: there is no prompt, or no answer was finished.
    """
    asked = [line.strip() for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not asked:
        raise BadInput(f"{prompts}: no prompts; write one a line.")
    store = store_for(base)
    store.require(base, "model")
    answers = dict(_answers(store.local(base), asked, max_tokens))
    lines = [
        json.dumps(
            {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answers[prompt]}]},
            ensure_ascii=False,
        )
        for prompt in dict.fromkeys(asked)
        if prompt in answers
    ]
    if not lines:
        raise BadInput(f"{base}: finished none of {len(asked)} answers within {max_tokens} tokens; allow more.")
    files.write(output, ("\n".join(lines) + "\n").encode())
    return {"output": str(output), "prompts": len(asked), "records": len(lines)}


def _answers(folder: Path, prompts: Sequence[str], max_tokens: int) -> Iterator[tuple[str, str]]:
    dtype = torch.bfloat16 if flags() & BFLOAT16_FLAGS else torch.float32
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    model: Any = load(folder, dtype=dtype, attention="sdpa").eval()
    # Equal lengths side by side: padding costs as much as text.
    ordered = sorted(prompts, key=lambda prompt: (len(prompt), prompt))
    started = time.monotonic()
    for first in range(0, len(ordered), BATCH):
        batch = ordered[first : first + BATCH]
        conversations = [[{"role": "user", "content": prompt}] for prompt in batch]
        inputs = tokenizer.apply_chat_template(
            conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
        for prompt, tokens in zip(batch, output[:, inputs["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            if text and tokenizer.eos_token_id in tokens.tolist():
                yield prompt, text
        done = first + len(batch)
        left = (time.monotonic() - started) / done * (len(ordered) - done)
        print(f"rehearse: {done} of {len(ordered)} prompts, {left:.0f} s left", file=sys.stderr)
