"""The heads that `make bench-heads` reads are trained like the pair's own; here of a tiny target, on little text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.speed.rows import TRAINED
from bench.speed.run import parser
from demo_pair.train import head
from demo_pair.train.corpus import SourceFile
from demo_pair.train.data import WINDOW, train_tokenizer
from specwire.lm import load_model
from specwire.lm.heads.slots import HeadedModel
from specwire.lm.training.distillation import Schedule
from tests.lm import models


def test_each_is_where_the_bench_looks_for_it_and_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"def f{index % 50}(x):\n    return x + {index % 7}\n" for index in range(400))
    tokenizer = train_tokenizer([text])
    shape = models.config("llama")
    shape.vocab_size, shape.num_hidden_layers, shape.max_position_embeddings = len(tokenizer), 6, WINDOW
    where = models.save(models.build(shape), tmp_path / "target")
    tokenizer.save_pretrained(where)
    own = torch.randint(len(tokenizer), (2, WINDOW + 1))
    monkeypatch.setattr(head, "TARGET", Path(where))
    monkeypatch.setattr(head, "ROWS", 2)
    monkeypatch.setattr(head, "EVALUATED", 2)
    files = [SourceFile("a.py", text, False), SourceFile("test/a.py", text, False), SourceFile("b.py", text, True)]
    monkeypatch.setattr(head, "read_corpus", lambda: files)
    monkeypatch.setattr(head, "load_own_windows", lambda *_: own)
    head.run(tmp_path, head.KINDS, Schedule(3e-3, 1, 2, 1))
    assert set(TRAINED) == set(head.KINDS) - {"eagle3"}
    assert parser().get_default("trained").parts[-2:] == ("build", "heads")
    for kind in head.KINDS:
        lm = load_model(where, slots=1, context=64, heads=str(tmp_path / kind), threads=1)
        assert isinstance(lm, HeadedModel)
        assert (tmp_path / kind / "training.json").is_file()
