"""A tiny base model made here: a tokenizer learnt from the texts it will see, weights at random from a fixed seed.

Small enough to learn its task from nothing in a minute on one core, and otherwise like the big ones: ChatML, tied
embeddings, the same files. The initial spread of the weights is 0.08; with the usual 0.02 so small a model does not
learn in time.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from refit.errors import BadInput
from trainer.bases import publish

VOCABULARY = 1536
SEED = 1
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def seed(uri: str, corpus: list[Path]) -> dict[str, Any]:
    """Commit a tiny untrained model; the same corpus gives the same files.

    Raises:
        BadInput: a file of the corpus is missing or holds no text.
    """
    texts = [text for path in corpus for text in _texts(path)]
    if not texts:
        raise BadInput(f"{', '.join(map(str, corpus))}: no texts to learn a tokenizer from.")
    tokenizer = _tokenizer(texts)

    def write(target: Path) -> None:
        tokenizer.save(str(target / "tokenizer.json"))
        _json(target / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": STOP, "pad_token": END,
            "unk_token": END, "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": 1024,
        })  # fmt: skip
        (target / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
        _model(tokenizer).save_pretrained(target)

    return publish(uri, write)


def _tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, START, STOP], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    start, stop, end = (tokenizer.token_to_id(token) for token in (START, STOP, END))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=128, intermediate_size=384, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.08, bos_token_id=start, eos_token_id=stop, pad_token_id=end, dtype=torch.float32,
    )  # fmt: skip
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    torch.set_rng_state(state)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=start, eos_token_id=stop, pad_token_id=end, do_sample=False
    )
    return model


def _texts(path: Path) -> Iterator[str]:
    """Every string in a jsonl, JSON or csv file, or the lines of a text file."""
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            if path.suffix == ".jsonl":
                for line in handle:
                    yield from _strings(json.loads(line)) if line.strip() else ()
            elif path.suffix == ".json":
                yield from _strings(json.load(handle))
            elif path.suffix == ".csv":
                for row in csv.reader(handle):
                    yield from row
            else:
                yield from (line.rstrip("\n") for line in handle)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as a corpus: {error}.") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
