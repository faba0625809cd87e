"""lm-eval's `local-completions` model: a multiple-choice task, tokenised by the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.clients.recording import Recorder

os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

DOCUMENTS = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "Berlin"], "gold": 0},
    {"question": "Water freezes at zero degrees", "choices": ["Newton", "Celsius", "miles"], "gold": 1},
    {"question": "The opposite of hot is", "choices": ["warm", "cold", "tall"], "gold": 1},
]


def test_a_multiple_choice_task_runs(recorder: Recorder, url: str, tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    task: dict[str, Any] = {
        "task": "local_choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    model = {
        "model": "smollm2",
        "base_url": f"{url}/completions",
        "tokenized_requests": True,
        "max_length": 2048,
    }
    results = simple_evaluate(
        "local-completions", model_args=model, tasks=[task], batch_size=3, task_manager=TaskManager()
    )
    assert results is not None
    assert results["results"]["local_choices"]["acc,none"] == 1.0
    assert recorder.refused == []
    asked = [body for body in recorder.requests if "echo" in body]
    assert sum(len(body["prompt"]) for body in asked) == 9
    assert all((body["echo"], body["logprobs"], body["max_tokens"]) == (True, 1, 1) for body in asked)
    assert all(isinstance(token, int) for body in asked for prompt in body["prompt"] for token in prompt)
