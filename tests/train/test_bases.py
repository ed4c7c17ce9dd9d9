"""Base models come in as data, never as code, and are named by what they hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tickets
from conftest import House
from tokenizers import Tokenizer

from refit.errors import BadInput
from refit.store import store_for
from trainer.bases import import_folder
from trainer.seed import seed


def test_the_same_corpus_gives_the_same_model(tmp_path: Path) -> None:
    text = tickets.corpus(tmp_path / "corpus.jsonl")
    first, second = (seed((tmp_path / name).as_uri(), [text]) for name in ("a", "b"))
    other = seed((tmp_path / "c").as_uri(), [tickets.corpus(tmp_path / "less.jsonl", count=50)])
    assert first["model_digest"] == second["model_digest"]
    assert first["model_digest"] != other["model_digest"]


def test_the_seed_tokenizer_reads_single_digits_and_gives_back_what_it_read(house: House) -> None:
    tokenizer = Tokenizer.from_file(str(store_for(house.base).local(house.base) / "tokenizer.json"))
    text = "order 4711, naïve 退款 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [token.strip("Ġ") for token in tokenizer.encode("order 4711").tokens][-4:] == ["4", "7", "1", "1"]


def test_an_imported_folder_is_committed_and_answers_twice(house: House, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(store_for(house.base).local(house.base), source)
    (source / "manifest.json").unlink()
    (source / "training_args.bin").write_bytes(b"a pickle that must stay outside")
    uri = (tmp_path / "imported").as_uri()
    first = import_folder(source, uri)
    assert first["model_digest"] == import_folder(source, uri)["model_digest"]
    assert store_for(uri).require(uri, "model").content_digest() == first["model_digest"]
    assert not (store_for(uri).local(uri) / "training_args.bin").exists()


def test_pickled_weights_are_refused(house: House, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(store_for(house.base).local(house.base), source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(BadInput, match="Pickled weights are not read"):
        import_folder(source, (tmp_path / "imported").as_uri())


def test_another_model_under_the_same_address_is_refused(house: House, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(store_for(house.base).local(house.base), source)
    uri = (tmp_path / "imported").as_uri()
    import_folder(source, uri)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(BadInput, match="another model is there"):
        import_folder(source, uri)
