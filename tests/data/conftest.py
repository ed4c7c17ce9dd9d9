"""A small line of its own: invented questions, a tokenizer trained on them, a store and a cache below tmp_path."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from corpus import cli
from refit.manifest import Manifest
from refit.store import store_for

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = """red blue green lamp chair order late broken happy thanks price return parcel where when please phone
desk""".split()  # noqa: SIM905


def sentences(count: int, seed: int = 1) -> list[str]:
    """Different sentences of seven words each."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(rng.choice(WORDS) for _ in range(7))] = None
    return list(found)


def answered(text: str) -> dict[str, str]:
    """An alpaca row whose label follows from the text."""
    mood = ("good", "bad")[len(text) % 2]
    return {"instruction": text, "input": "", "output": json.dumps({"mood": mood})}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of a few hundred tokens with ChatML; the token that pads is the token that ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(sentences(300), trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


class Line:
    """A pipeline file with its data, and what `corpus prepare` says to it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.stderr = ""
        self._capsys = capsys
        self.store = f"file://{folder}/store"
        self.spec: dict[str, Any] = {
            "name": "small", "title": "Small", "team": "tests", "owner": "tests@example.com",
            "data": {
                "sources": [], "system": "Name the mood as JSON.", "label_key": "mood", "pack_length": 256,
                "split": {"heldout": 0.2, "validation": 0.1}, "expect": {"min_records": 10},
            },
            "train": {"base": f"file://{folder}/base"},
        }  # fmt: skip

    @property
    def data(self) -> dict[str, Any]:
        """The data part of the spec."""
        part: dict[str, Any] = self.spec["data"]
        return part

    def deliver(self, name: str, content: bytes | str | list[Any], file: str = "part.jsonl", **source: Any) -> Path:
        """Write a file of a source; a list is written as jsonl."""
        path = self.folder / "raw" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if name not in [known["name"] for known in self.data["sources"]]:
            self.data["sources"].append({"name": name, "uri": f"file://{path.parent}", **source})
        return path

    def prepare(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and the last line of stdout of `corpus prepare`."""
        return self.corpus("prepare", str(self.write()), "--store", self.store, *arguments)

    def write(self) -> Path:
        """The pipeline file as it is now."""
        path = self.folder / "small.yaml"
        path.write_text(yaml.safe_dump(self.spec))
        return path

    def corpus(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and the last line of stdout of `corpus`."""
        self._capsys.readouterr()
        code = cli.main(list(arguments))
        stdout, self.stderr = self._capsys.readouterr()
        answer: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return code, answer

    def dataset(self, *arguments: str) -> Path:
        """The dataset folder of a run that must succeed."""
        code, answer = self.prepare(*arguments)
        assert code == 0, answer
        return Path(answer["manifest"].removeprefix("file://")).parent

    @staticmethod
    def manifest(folder: Path) -> Manifest:
        """The manifest of a folder that must have one."""
        found = store_for("file:///").manifest(folder.as_uri())
        assert found
        return found

    @staticmethod
    def rows(folder: Path, name: str) -> list[dict[str, Any]]:
        """The rows of a parquet file."""
        found: list[dict[str, Any]] = pq.read_table(folder / name).to_pylist()
        return found

    @classmethod
    def said(cls, dataset: Path, phase: str, name: str = "rows.parquet") -> list[dict[str, Any]]:
        """The rows of a phase that decides over rows, each with its messages (a drill's answers given out)."""
        clean = cls.phase(dataset, "clean")
        shards = [
            cls.rows(clean.parents[1] / "shards" / "clean" / shard["name"], "records.parquet")
            for shard in json.loads((clean / "shards.json").read_text())
        ]
        found = []
        for row in cls.rows(cls.phase(dataset, phase), name):
            messages = json.loads(shards[row["shard"]][row["row"]]["messages"])
            if "answer_row" in row:
                messages[-1] = json.loads(shards[row["answer_shard"]][row["answer_row"]]["messages"])[-1]
            found.append({**row, "messages": messages})
        return found

    @staticmethod
    def phase(dataset: Path, name: str) -> Path:
        """The folder of an earlier phase of a dataset."""
        (told,) = (told for told in Line.manifest(dataset).facts["before"] if told["name"] == name)
        return dataset.parents[1] / name / told["fingerprint"]


@pytest.fixture
def line(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Line:
    monkeypatch.setenv("REFIT_CACHE", str(tmp_path / "cache"))
    made = Line(tmp_path, capsys)
    base = made.spec["train"]["base"]
    with store_for(base).publish(base) as draft:
        for file in tokenizer.iterdir():
            (draft.path / file.name).write_bytes(file.read_bytes())
        draft.commit(Manifest(kind="model", fingerprint="base"))
    return made


@pytest.fixture
def small(line: Line) -> Line:
    """A line of 240 records in three formats."""
    texts = sentences(240)
    line.deliver("mail", [answered(text) for text in texts[:100]], weight=2)
    chat = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answered(text)["output"]}]}
        for text in texts[100:170]
    ]
    line.deliver("chat", json.dumps(chat), "part.json")
    rows = "".join(f'{text},"{answered(text)["output"].replace(chr(34), chr(34) * 2)}"\n' for text in texts[170:])
    line.deliver("calls", "note,reply\n" + rows, "part.csv", columns={"prompt": "note", "completion": "reply"})
    return line


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server of S3's own on this machine."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="corpus")
        yield "s3://corpus"
    finally:
        server.stop()


Sentences = Callable[[int], list[str]]


@pytest.fixture
def texts() -> Sentences:
    return sentences
