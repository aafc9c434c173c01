"""A task for EleutherAI's harness, in two small files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TASK = """
task: coins
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["a", "b"]
doc_to_target: "{{{{label}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def questions() -> list[dict[str, Any]]:
    rng = random.Random(6)
    return [{"question": "".join(rng.choices("ab ?", k=20)) + "So:", "label": rng.randrange(2)} for _ in range(40)]


def write(folder: Path) -> Path:
    """Write the data, and the task file that reads them; return the folder of the task file."""
    data = folder / "coins.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in questions()))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "coins.yaml").write_text(TASK.format(data=data))
    return folder / "tasks"
